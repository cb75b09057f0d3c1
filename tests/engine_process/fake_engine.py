"""A fake engine's processes: a parent, a child and a grandchild, as vLLM has its server, its core and its worker.

    python fake_engine.py FOLDER [stubborn] [stray]

Each writes its process id into FOLDER. `stubborn` ones ignore SIGTERM; a `stray` grandchild leaves the session.
"""

import os
import signal
import sys
import time
from pathlib import Path


def be(name: str, folder: Path) -> None:
    """Leaves a note of this process, whole at once."""
    draft = folder / f".{name}"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / name)


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2:]
    if "stubborn" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in ("engine", "core"):
        if os.fork():
            be(name, folder)
            break
    else:
        if "stray" in how:
            os.setsid()
        be("worker", folder)
    print(f"{os.getpid()} runs", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
