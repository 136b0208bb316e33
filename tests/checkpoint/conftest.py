from __future__ import annotations

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 256 kB, and give its folder; skip the test unless the user is root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root; other tests limit the size of files instead")
    yield folder
    subprocess.run(["umount", folder], check=True)
