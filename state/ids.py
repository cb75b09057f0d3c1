"""Names for things. Random parts come from the system's generator, so that an id cannot be guessed or met twice.

What clients see looks as they expect it: `file-` and 22 letters, `batch_` and 32 hexadecimal digits, which begin with the
time of creation and so keep index pages together.
"""

import hashlib
import secrets

#: Without 0, O, I and l, which people confuse.
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def new_file_id() -> str:
    """`file-` and 22 random letters: 128 bits."""
    return "file-" + "".join(secrets.choice(_ALPHABET) for _ in range(22))


def new_batch_id(now: float) -> str:
    """`batch_`, eight digits of time (whole seconds, wrapping round in 2106) and 96 random bits."""
    return f"batch_{int(now) & 0xFFFF_FFFF:08x}{secrets.token_hex(12)}"


def new_job_id() -> str:
    """The id of a plan or finish job; no client sees it."""
    return "job_" + secrets.token_hex(12)


def new_worker_id() -> str:
    """The id of a worker's or an orchestrator's process: new at every start."""
    return "worker_" + secrets.token_hex(8)


def line_id(batch_id: str, line: int) -> str:
    """The `id` of a result line: the same in every attempt, because it is made of the request's identity.

    `line` is 0-based and counts the requests of the input, not its blank lines.
    """
    return "batch_req_" + hashlib.sha256(f"{batch_id}:{line}".encode()).hexdigest()[:32]
