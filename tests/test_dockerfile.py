"""The Dockerfile without Docker: linted, and its steps run over a copy-on-write root of this machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "Dockerfile"
# What stands for the downloads of an image: the packages are this machine's.
OFFLINE = "--no-deps --no-build-isolation --no-index"
# Mounts what was changed over `/` for one command, which sees the devices and processes of this machine.
OVER = """
mount -t overlay none -o lowerdir=/,upperdir="$0/upper",workdir="$0/work" "$0/root" &&
mount --rbind /dev "$0/root/dev" && mount -t proc none "$0/root/proc" && exec chroot "$@"
"""


@dataclass
class Image:
    """A stage as far as it was built."""

    folder: Path
    user: str = "0"
    at: str = "/"
    values: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in it, by its user."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        env = {"PATH": path, "HOME": f"/home/{self.user}", "PYTHONDONTWRITEBYTECODE": "1", **self.values}
        words = ["unshare", "--mount", "sh", "-c", OVER, str(self.folder)]
        words += [
            f"--userspec={self.user}",
            str(self.folder / "root"),
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
            self.at,
        ]
        return subprocess.run([*words, *command], env=env, capture_output=True, text=True, timeout=280)

    def copy(self, names: list[str], to: str) -> None:
        """COPY, without what `.dockerignore` leaves out."""
        left_out = shutil.ignore_patterns("__pycache__")
        for name in names:
            target = self.folder / "upper" / self.at.strip("/") / (to if to != "./" else name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=left_out)
            else:
                shutil.copy(ROOT / name, target)


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of every instruction."""
    text = re.sub(r"^\s*#.*\n", "", RECIPE.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [
        (line.split()[0], line.split(maxsplit=1)[1].strip()) for line in text.splitlines() if line.strip()
    ]


def build(image: Image, target: str) -> list[str]:
    """All steps of `base` and of `target`; the commands that were left out."""
    left_out, stage = [], ""
    for word, rest in instructions():
        if word == "FROM":
            stage = rest.split()[-1]
        elif stage not in ("base", target) or word == "ARG":
            continue
        elif word == "RUN" and rest.startswith("apt-get"):
            left_out.append(rest)
        elif word == "RUN":
            done = image.run("sh", "-c", rest.replace("${PIP_ARGS}", OFFLINE))
            assert done.returncode == 0, f"{rest}\n{done.stdout}{done.stderr}"
        elif word == "COPY":
            *names, to = rest.split()
            image.copy(names, to)
        elif word == "ENV":
            image.values |= dict(pair.split("=", 1) for pair in rest.split())
        elif word == "WORKDIR":
            image.at = rest
            (image.folder / "upper" / rest.strip("/")).mkdir(parents=True)
        else:
            assert word == "USER", word
            image.user = rest
    return left_out


@pytest.mark.skipif(not shutil.which("hadolint"), reason="needs hadolint")
def test_dockerfile_passes_hadolint() -> None:
    done = subprocess.run(["hadolint", RECIPE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_user_of_the_image_is_a_number() -> None:
    """`runAsNonRoot` of Kubernetes cannot look names up."""
    (user,) = [rest for word, rest in instructions() if word == "USER"]
    (made,) = [rest for word, rest in instructions() if rest.startswith("useradd")]
    assert user.isdigit() and user != "0" and f"--uid {user} " in made


@pytest.fixture
def folder(tmp_path: Path):
    """An empty file system of its own: an overlay cannot lie on an overlay."""
    if subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("needs to mount (root)")
    for name in ("upper", "work", "root"):
        (tmp_path / name).mkdir()
    try:
        if Image(tmp_path).run(sys.executable, "-c", "0").returncode != 0:
            pytest.skip("needs an overlay over / with this Python in it")
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.full
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_image_has_what_an_experiment_needs(folder: Path, target: str) -> None:
    """What is copied suffices to install and to run, as the image's user, whose runs are written where `-v` mounts."""
    image = Image(folder)
    passwd = Path("/etc/passwd").read_text().splitlines(keepends=True)
    (folder / "upper/etc").mkdir()
    (folder / "upper/etc/passwd").write_text("".join(line for line in passwd if ":1000:" not in line))
    (packages,) = build(image, target)
    assert {"gcc", "libc6-dev", "procps", "wget"} <= set(packages.split())
    words = [
        "method=ifca",
        "clusters=2",
        "data.rotations=2",
        "clients=4",
        "rounds=1",
        "model=mlp",
        "name=seen",
    ]
    done = image.run("archipelago", *words, "fleet.backend=in_process")
    assert done.returncode == 0, done.stdout + done.stderr
    written = folder / "upper/archipelago/runs/seen"
    assert json.loads((written / "status.json").read_text())["state"] == "finished"
    assert written.stat().st_uid == 1000
    where = image.run(
        sys.executable,
        "-c",
        "import archipelago, os; print(archipelago.__file__, os.environ['RAY_AUTH_MODE'])",
    )
    assert where.stdout.split() == ["/archipelago/archipelago/__init__.py", "token"]
    assert (target == "cuda") == ("NVIDIA_VISIBLE_DEVICES" in image.values)
