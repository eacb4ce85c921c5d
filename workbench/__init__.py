"""EAGLE-3 drafter workbench."""
