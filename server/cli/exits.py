"""How a command ends: the exit codes, and the one exception that carries one. docs/cli.md lists them for scripts."""

from state.records import OvernightError

OK = 0
FAILED = 1
USAGE = 2
NO_SUCH_OBJECT = 3
NO_SERVER = 4
WRONG_KEY = 5
ENDED_OTHERWISE = 6
INTERRUPTED = 130


class Failure(OvernightError):
    """A command cannot do what was asked. The message is the one line that the person sees."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
