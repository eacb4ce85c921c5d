"""The one exception for a user's mistake.

Everything that a user can get wrong (a path, a file, a parameter, two inputs that do not fit) raises `InputError` with one
sentence that says what is wrong, where, what was expected and what to do. The command line prints the sentence and exits with
code 2; a notebook shows it at the top of its report. Anything else that escapes is a bug of ours and keeps its traceback.
"""


class InputError(Exception):
    """A mistake in the input: one sentence for the user (what, where, expected, what to do).

    code: the name of the fault when a file itself is at fault ("file-truncated", "wrong-model", ...), else None.
    """

    def __init__(self, sentence: str, code: str | None = None):
        super().__init__(sentence)
        self.code = code

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback, which says nothing about the input."""
        return [f"{type(self).__name__}: {self}"]
