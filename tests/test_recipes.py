"""The recipes are checked as far as one machine allows: schemas, shellcheck, what they name."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema  # a dependency of Ray's
import pytest
import yaml

import archipelago.cli.main
from archipelago.experiments.config import load_config
from archipelago.sweeps.config import load_sweep
from tests.support.clusters import family, free_ports, short_folder, still_alive

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
SCRIPTS = [RECIPES / "single-node.sh", RECIPES / "slurm" / "archipelago.sbatch"]


def ray_version() -> str:
    found = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert found is not None
    return found[1]


def cluster_specs() -> list[dict]:
    cluster = yaml.safe_load((RECIPES / "kubernetes" / "raycluster.yaml").read_text(encoding="utf-8"))
    job = yaml.safe_load((RECIPES / "kubernetes" / "rayjob.yaml").read_text(encoding="utf-8"))
    assert (cluster["kind"], job["kind"]) == ("RayCluster", "RayJob")
    return [cluster["spec"], job["spec"]["rayClusterSpec"]]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_valid_shell(path: Path) -> None:
    shell = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#!")
    subprocess.run([shell, "-n", path], check=True)


@pytest.mark.skipif(not shutil.which("shellcheck") and not os.environ.get("CI"), reason="needs shellcheck")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_passes_shellcheck(path: Path) -> None:
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_commands_outside_of_a_job_name_the_cluster_that_they_join() -> None:
    """Without an address `archipelago` starts a Ray of its own, and every other node is idle."""
    pages = [*RECIPES.rglob("*.yaml"), *RECIPES.rglob("*.md"), *(ROOT / "docs/running").glob("*.md")]
    sent = [
        command for page in pages
        for command in re.findall(r"ray exec [^\n\\]+(?:\\\n[^\n\\]+)*", page.read_text(encoding="utf-8"))
    ]  # fmt: skip
    assert len(sent) >= 2 and all("archipelago" in command for command in sent)
    assert all({"RAY_ADDRESS=auto", "RAY_AUTH_MODE=token"} <= set(command.split()) for command in sent), sent


def test_kubernetes_recipes_agree_with_the_tested_ray_and_claim_their_volume() -> None:
    claim = yaml.safe_load((RECIPES / "kubernetes" / "storage.yaml").read_text(encoding="utf-8"))
    for spec in cluster_specs():
        assert spec["rayVersion"] == ray_version() and spec["authOptions"] == {"mode": "token"}
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            pod = group["template"]["spec"]
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
            assert mounts == set(volumes)
            assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_ray_up_passes_rays_own_schema() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((RECIPES / "ray-up.yaml").read_text(encoding="utf-8")))
    validate_config(config)
    config["no_such_key"] = 1
    with pytest.raises(Exception, match="no_such_key"):
        validate_config(config)


def test_dockerfile_copies_what_is_there_and_lets_it_through() -> None:
    text = (RECIPES / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.+)$", text, re.M) for name in line.split()[:-1]]
    allowed = (RECIPES / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert copied and all((ROOT / name).exists() and f"!{name}" in allowed for name in copied)
    assert re.findall(r"^FROM \S+ AS (\w+)$", text, re.M) == ["base", "cuda", "cpu"]


def test_prometheus_recipe_names_the_list_that_ray_keeps() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    config = yaml.safe_load((RECIPES / "monitoring" / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"][0]["files"][0].endswith(PROMETHEUS_SERVICE_DISCOVERY_FILE)


def kuberay(kind: str) -> jsonschema.Draft202012Validator:
    """KubeRay's own schema of a kind, as far as recipes use it; what it does not know, it refuses."""
    schemas = json.loads((ROOT / "tests/support/kuberay_v1.json").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator({**schemas, "$ref": f"#/$defs/{kind}"})


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_kubernetes_recipe_passes_kuberays_own_schema(name: str) -> None:
    recipe = yaml.safe_load((RECIPES / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8"))
    schema = kuberay(recipe["kind"])
    assert recipe["apiVersion"] == "ray.io/v1"
    schema.validate(recipe)
    for where, wrong, value in (("head", "rayStartParameters", {}), ("worker", "replicas", "two")):
        broken = copy.deepcopy(recipe)
        cluster = broken["spec"].get("rayClusterSpec", broken["spec"])
        group = cluster["headGroupSpec"] if where == "head" else cluster["workerGroupSpecs"][0]
        group[wrong] = value
        (error,) = schema.iter_errors(broken)
        assert wrong in f"{error.message} {list(error.absolute_path)}"


def test_kubernetes_pods_are_given_what_they_may_use() -> None:
    job = yaml.safe_load((RECIPES / "kubernetes" / "rayjob.yaml").read_text(encoding="utf-8"))
    assert "\n" not in job["spec"]["entrypoint"] and job["spec"]["entrypoint"].count("'") == 2
    for spec in cluster_specs():
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            for container in group["template"]["spec"]["containers"]:
                assert container["resources"]["limits"] == container["resources"]["requests"]


def test_rayjob_entrypoint_starts_and_resumes(tmp_path: Path) -> None:
    """Its shell, with a command that says what it was asked for in the place of ours."""
    job = yaml.safe_load((RECIPES / "kubernetes" / "rayjob.yaml").read_text(encoding="utf-8"))
    (tmp_path / "archipelago").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "archipelago").chmod(0o755)
    line = job["spec"]["entrypoint"].replace("/runs", str(tmp_path / "runs"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    def asked() -> list[str]:
        return subprocess.run(
            line, shell=True, env=env, capture_output=True, text=True, check=True
        ).stdout.split()

    first = asked()
    assert first[0] == "--config" and load_sweep(*_request(first)) is not None
    (tmp_path / "runs/table").mkdir(parents=True)
    (tmp_path / "runs/table/sweep.yaml").touch()
    assert asked() == ["resume", str(tmp_path / "runs/table")]


def _request(words: list[str]) -> tuple[Path | None, list[str], None, bool]:
    request = archipelago.cli.main.parse(words)
    return request.file, request.overrides, None, request.small  # type: ignore[attr-defined]  # of a run


def test_metrics_of_pods_are_found_by_their_port_and_label() -> None:
    monitor = yaml.safe_load((RECIPES / "kubernetes" / "podmonitor.yaml").read_text(encoding="utf-8"))
    cluster = yaml.safe_load((RECIPES / "kubernetes" / "raycluster.yaml").read_text(encoding="utf-8"))
    assert monitor["spec"]["selector"]["matchLabels"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports[endpoint["port"]]) == group["rayStartParams"]["metrics-export-port"]


def test_grafana_shows_the_metrics_that_runs_export() -> None:
    sources = yaml.safe_load((RECIPES / "monitoring/grafana/datasources.yaml").read_text(encoding="utf-8"))
    dashboard = json.loads((ROOT / "actors/grafana_dashboard.json").read_text(encoding="utf-8"))
    kinds = {source["type"] for source in sources["datasources"]}
    assert {panel["datasource"]["type"] for panel in dashboard["panels"]} == kinds == {"prometheus"}


def test_s3_secret_has_the_names_that_pyarrow_reads() -> None:
    secret = yaml.safe_load((RECIPES / "kubernetes" / "s3.yaml").read_text(encoding="utf-8"))
    assert set(secret["stringData"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"}


def slurm(tmp_path: Path, srun: str, nodes: str, **env: str) -> dict[str, str]:
    """The environment of a job of Slurm's, with commands of ours in the place of Slurm's."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    asked = f'case "$1" in show) printf "{nodes}\\n" ;; *) echo "scontrol $*" ;; esac'
    for name, text in {"srun": srun, "scontrol": asked}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[0-1]",
             "SLURM_JOB_NUM_NODES": str(nodes.count("\\n") + 1), "SLURM_CPUS_PER_TASK": "2", **env}  # fmt: skip
    return {"PATH": f"{folder}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", **given}


def words_of_slurm(tmp_path: Path, *words: str) -> list[str]:
    """What the job's script asks Ray for: `srun` says it, and what it would start is not started."""
    env = slurm(tmp_path, 'printf "%s\\n" "RAY_ADDRESS=$RAY_ADDRESS" "$@"', "node-0\\nnode-1")
    done = subprocess.run(["bash", SCRIPTS[1], *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob(".ray-token-*"))  # the token is gone with the job
    return done.stdout.splitlines()


def test_slurm_script_starts_ray_on_all_nodes_and_resumes(tmp_path: Path) -> None:
    words = words_of_slurm(tmp_path, "method=ifca", "name=big")
    start, command = words[: words.index("--")], words[words.index("--") + 1 :]
    cluster = f"node-0:{20000 + 77}"
    assert start == [f"RAY_ADDRESS={cluster}", "--kill-on-bad-exit=1", "ray", "symmetric-run", "--address", cluster,
                     "--min-nodes", "2", "--num-cpus", "2", "--temp-dir", "/tmp/ray-77"]  # fmt: skip
    assert command[:2] == ["sh", "-c"] and "exec archipelago" in command[2]
    assert command[4:] == ["method=ifca", "name=big", f"storage={tmp_path}/runs", "name=big"]
    assert load_config(None, command[4:]).name == "big"
    (tmp_path / "runs/big").mkdir(parents=True)
    (tmp_path / "runs/big/config.yaml").touch()
    assert words_of_slurm(tmp_path, "method=ifca", "name=big")[-2:] == ["resume", f"{tmp_path}/runs/big"]


# In a process and network namespace of its own: `ray symmetric-run` ends with `ray stop`, which ends every Ray it sees.
ALONE = [
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--net",
    "--mount-proc",
    "sh",
    "-c",
    'ip link set lo up; "$@"',
    "-",
]


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.skipif(
    subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0, reason="needs namespaces (root)"
)
def test_slurm_job_runs_on_its_cluster_stops_in_time_and_resumes(tmp_path: Path) -> None:
    """`ray symmetric-run` itself on one node: TERM reaches the driver, and the same words resume the run."""
    drop_options = 'while case "$1" in -*) ;; *) false ;; esac; do shift; done; exec "$@"'
    env = slurm(tmp_path, drop_options, "127.0.0.1", HOME=str(tmp_path))
    # The shell waits for the third round, and then does what Slurm does to the script.
    script = f'''
        bash "{SCRIPTS[1]}" "$@" & job=$!
        while [ "$(cat "$STORAGE/cut/metrics.csv" 2>/dev/null | wc -l)" -lt 4 ] && kill -0 $job; do sleep 0.2; done
        [ -n "$LET" ] || kill -TERM $job
        wait $job; echo "ended with $?"
        ps -e -o args= | grep -c "[r]ay/core" || true
    '''
    words = ["method=fedavg", "clients=2", "model=mlp", "rounds=40"]

    def said(let: str) -> str:
        given = {**env, "STORAGE": str(tmp_path / "runs"), "LET": let}
        command = [*ALONE, "bash", "-c", script, "-", *words, "name=cut"]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=250)
        assert f"the Ray cluster at 127.0.0.1:{20000 + 77}" in done.stdout, done.stdout + done.stderr
        assert done.stdout.splitlines()[-2:] == ["ended with 0", "0"], done.stdout + done.stderr
        assert not list(tmp_path.glob(".ray-token-*")) and not Path("/tmp/archipelago-77.pid").exists()
        return done.stdout + done.stderr

    cut = said("")
    assert "Ended from outside" in cut and "scontrol requeue 77" in cut
    assert archipelago.open_run(tmp_path / "runs/cut").status.rounds_done < 40
    assert "scontrol" not in said("let it end")
    whole = archipelago.run(
        method="fedavg", clients=2, model="mlp", rounds=40, fleet={"backend": "in_process"},
        storage=str(tmp_path), name="whole", quiet=True,
    )  # fmt: skip
    resumed = archipelago.open_run(tmp_path / "runs/cut")
    assert resumed.status.state == "finished" and resumed.metrics.equals(whole.metrics)


def test_symmetric_run_knows_what_the_slurm_script_asks_for() -> None:
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    known = {option for command in (start, symmetric_run) for each in command.params for option in each.opts}
    text = SCRIPTS[1].read_text(encoding="utf-8")
    asked = set(re.findall(r"^ {4}(--[\w-]+) ", text, re.M)) - {"--kill-on-bad-exit"}
    assert len(asked) >= 4 and asked <= known


@pytest.mark.full
@pytest.mark.ray
def test_single_node_recipe_starts_submits_and_stops_its_own_cluster(tmp_path: Path) -> None:
    with short_folder() as temporary:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        names = ("PORT", "DASHBOARD_PORT", "METRICS_PORT", "AGENT_PORT", "CLIENT_PORT")
        ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
        env = {**kept, **ports, "RAY_TMPDIR": str(temporary), "STORAGE": str(tmp_path),
               "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
               "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"}  # fmt: skip
        (tmp_path / "token").write_text("0" * 64)

        def said(*words: str, code: int = 0) -> str:
            done = subprocess.run(
                ["sh", SCRIPTS[0], *words], env=env, capture_output=True, text=True, timeout=280
            )
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout

        assert f"http://127.0.0.1:{ports['DASHBOARD_PORT']}" in said("start")
        processes = family(int((temporary / "head.pid").read_text()))
        try:
            said("submit", "method=fedavg", "rounds=1", "clients=2", "name=sent", "model=mlp")
            said("start", code=2)
            assert archipelago.open_run(tmp_path / "sent").status.state == "finished"
        finally:
            said("stop")
        assert still_alive(processes) == []
        said("stop", code=2)


def test_kubernetes_objects_pass_kubernetes_own_schemas() -> None:
    """The volume, the Secret, and the pods inside of KubeRay's objects, whose own schema leaves most of a pod open."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate").validate
    names = ("storage", "s3")
    known = [
        yaml.safe_load((RECIPES / f"kubernetes/{name}.yaml").read_text(encoding="utf-8")) for name in names
    ]
    for spec in cluster_specs():
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            pod = group["template"]["spec"]
            known.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod})
    assert len(known) == 6
    for each in known:
        validate(each, "1.30", strict=True)
    known[-1]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(Exception, match="resource"):
        validate(known[-1], "1.30", strict=True)
