"""The data folder belongs to one `serve`, and to its children until the last of them has ended."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from server.roles import folder


def test_the_folder_is_private_even_if_it_was_not(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    folder.prepare(data)
    assert stat.S_IMODE(data.stat().st_mode) == 0o700


def test_a_folder_that_somebody_uses_keeps_its_mode(tmp_path: Path) -> None:
    """`--data /tmp` must not shut everybody out of /tmp."""
    data = tmp_path / "shared"
    data.mkdir()
    (data / "theirs.txt").touch()
    data.chmod(0o1777)
    folder.prepare(data)
    assert stat.S_IMODE(data.stat().st_mode) == 0o1777
    assert stat.S_IMODE((data / "run").stat().st_mode) == 0o700


def test_overnights_own_folder_is_made_private_again(tmp_path: Path) -> None:
    folder.prepare(tmp_path)
    os.close(folder.lock(tmp_path))
    tmp_path.chmod(0o755)
    folder.prepare(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(folder.FolderUnusable, match="file/data cannot be used: Not a directory"):
        folder.prepare(tmp_path / "file" / "data")


def test_a_second_taker_is_told_who_has_it(tmp_path: Path) -> None:
    folder.prepare(tmp_path)
    held = folder.lock(tmp_path)
    with pytest.raises(folder.FolderInUse, match=f"process {os.getpid()} on "):
        folder.lock(tmp_path)
    os.close(held)
    os.close(folder.lock(tmp_path))


def test_the_lock_lasts_until_the_last_child_has_ended_and_its_end_is_awaited(tmp_path: Path) -> None:
    folder.prepare(tmp_path)
    took = "import subprocess, sys; from pathlib import Path; from server.roles import folder\n"
    took += f"held = folder.lock(Path({str(tmp_path)!r}))\n"
    took += "child = subprocess.Popen(['sleep', '60'], pass_fds=(held,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(child.pid)"
    child = int(subprocess.run([sys.executable, "-c", took], capture_output=True, text=True, check=True).stdout)
    said: list[str] = []

    def end_child(text: str) -> None:
        said.append(text)
        os.kill(child, 9)

    os.close(folder.lock(tmp_path, say=end_child))
    assert said == ["waiting for the processes of an earlier serve to end"]


def test_a_holder_that_was_killed_but_not_yet_waited_for_counts_as_gone(tmp_path: Path) -> None:
    folder.prepare(tmp_path)
    took = "import subprocess, sys, time; from pathlib import Path; from server.roles import folder\n"
    took += f"held = folder.lock(Path({str(tmp_path)!r}))\n"
    took += "child = subprocess.Popen(['sleep', '60'], pass_fds=(held,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(child.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", took], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        child = int(holder.stdout.readline())
        holder.kill()  # and a zombie from now on: nobody waits for it until the block ends
        os.close(folder.lock(tmp_path, say=lambda text: os.kill(child, 9)))
