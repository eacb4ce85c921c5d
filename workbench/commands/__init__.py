"""The commands of `workbench`, one file a kind. Each imports what it needs itself: looking at a checkpoint never waits for torch."""
