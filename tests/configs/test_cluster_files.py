"""The files in `configs/cluster/`: valid for their own tools, and in agreement with the project.

No cluster is started. Slurm's options come from `sbatch_options.txt`, the API of Kubernetes from
the schemas that kubernetes-validate ships, units from the local systemd.
"""

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate.utils import ValidationError, all_versions, validate

from evolver_async import __version__
from evolver_async.cli import _parser
from evolver_async.commands.recipes import recipe_path
from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.launch.child import FINAL
from evolver_async.wire import keys

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "configs" / "cluster"
SLURM = CLUSTER / "slurm.sbatch"
KUBERNETES = CLUSTER / "kubernetes.yml"
DOCKERFILE = CLUSTER / "Dockerfile"
UNIT = CLUSTER / "evolver-async@.service"
SCALING = (ROOT / "docs" / "scaling.md").read_text()
LEAST_DRAIN_S = 4 * Config().launch.drain_s  # the roles end one after the other
VERSIONS = [one for one in all_versions() if int(one.split(".")[1]) >= 30]
HOST = {"host": "trainer", "buffer_port": "4000", "weights_port": "4001", "NAMESPACE": "default"}
HOST |= {"recipe": "gpu_cluster", "name": "my-run", "EVOLVER_SHARED": "/shared"}
HOST |= {"EVOLVER_BUFFER": "tcp://trainer:4000", "RECIPE": "frozen_lake", "CHANGES": ""}
HOST |= {"@": "policy.path=/shared/model"}


def objects() -> dict[str, dict[str, Any]]:
    """The Kubernetes objects by kind."""
    documents = list(yaml.safe_load_all(KUBERNETES.read_text()))
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def pod(kind: str) -> dict[str, Any]:
    return objects()[kind]["spec"]["template"]["spec"]


def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(UNIT)
    return parser["Service"]


def rendered(text: str) -> str:
    """Put values in the place of the variables of a shell, of Kubernetes and of systemd."""
    text = text.replace("%i", "my-run").replace("%S", "/var/lib")
    return re.sub(r"\$[{(]?(\w+|@)[)}]?", lambda found: HOST[found[1]], text)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every start of `evolver-async` in the files, as arguments."""
    script = re.sub(r"^ *#.*", "", SLURM.read_text(), flags=re.M).replace("\\\n", "")
    for line in re.findall(r"evolver-async ((?:train|actor).*?)(?: &|; do)?$", script, re.M):
        yield "slurm", shlex.split(rendered(line))
    for kind in ("StatefulSet", "Deployment"):
        (container,) = pod(kind)["containers"]
        words = [*container["command"], *container["args"]]
        assert words[0] == "evolver-async"
        yield "kubernetes", [rendered(word) for word in words[1:]]
    yield "systemd", shlex.split(rendered(unit()["ExecStart"]))[1:]


COMMANDS = list(commands())
TRAIN = [(name, words) for name, words in COMMANDS if words[0] == "train"]


def changes_of(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_every_start_is_found() -> None:
    found = [(name, words[0]) for name, words in COMMANDS]
    both = [(name, word) for name in ("slurm", "kubernetes") for word in ("train", "actor")]
    assert found == [*both, ("systemd", "train")]


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_commands_parse(name: str, words: list[str]) -> None:
    parser, _ = _parser()
    args, rest = parser.parse_known_args(words)
    assert not [word for word in rest if args.command != "train" or word.startswith("-")]
    if args.command == "train":
        assert str(args.resume) == "auto"
    else:
        assert args.connect and args.keys


@pytest.mark.parametrize(("name", "words"), TRAIN)
def test_recipes_load_with_their_changes(name: str, words: list[str]) -> None:
    config = load(recipe_path(words[1]), [word for word in words[2:] if "=" in word])
    assert config.run.name == "my-run" and Path(config.run.dir).is_absolute()
    assert (config.weights.kind == "collective") == (name != "systemd")


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_ports_agree_with_the_documents(name: str, words: list[str]) -> None:
    if name == "systemd":
        assert "address" not in " ".join(words)  # one machine needs no port
        return
    changes = changes_of(words)
    if words[0] == "actor":
        assert words[words.index("--connect") + 1].endswith(":4000")
    else:
        assert changes["buffer.address"] == "tcp://0.0.0.0:4000"
        assert changes["weights.address"].endswith(":4001")
    assert {port for port in ("4000", "4001", "9090") if f"| port {port} of" in SCALING} == {
        "4000",
        "4001",
        "9090",
    }


# Slurm


def options(line: str) -> list[str]:
    return re.findall(r"--([a-z-]+)", line)


@pytest.mark.process
def test_the_job_is_valid_bash() -> None:
    done = subprocess.run(["bash", "-n", SLURM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_of_the_job_exist() -> None:
    lines = re.findall(r"^#SBATCH (.*)", SLURM.read_text(), re.M)
    assert lines.count("hetjob") == 1
    known = (Path(__file__).parent / "sbatch_options.txt").read_text().splitlines()
    for line in lines:
        assert line == "hetjob" or re.fullmatch(r"(--[a-z-]+)(=\S+)?", line), line
        assert line == "hetjob" or line.partition("=")[0] in known, line
    first = lines[: lines.index("hetjob")]
    assert {"--requeue", "--signal=B:TERM@120"} <= {*first}
    # srun does not take the number of CPUs from sbatch
    (cpus,) = [line for line in lines if line.startswith("--cpus-per-task")]
    assert f"srun --het-group=1 {cpus} " in SLURM.read_text()


def test_the_time_of_the_signal_suffices_for_a_drain() -> None:
    (seconds,) = re.findall(r"--signal=B:TERM@(\d+)", SLURM.read_text())
    assert int(seconds) > LEAST_DRAIN_S


STUB = """#!/bin/bash
trap 'echo "{name} TERM" >> "$LOG"; exit {code}' TERM
echo "{name} $*" >> "$LOG"
echo > "$STARTED.{name}"
while :; do read -r -t 1 <> "$NEVER"; done
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of the job's script, with stubs of the commands that it starts."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for fifo in ("started.launcher", "started.srun", "never", "end"):
        os.mkfifo(tmp_path / fifo)
    (programs / "srun").write_text(STUB.format(name="srun", code=0))
    (programs / "scontrol").write_text('#!/bin/bash\necho "scontrol $*" >> "$LOG"\n')
    paths = {name.upper(): str(tmp_path / name) for name in ("started", "never", "end", "log")}
    return os.environ | paths | {"EVOLVER_SHARED": str(tmp_path), "SLURM_JOB_ID": "17"}


def start(job: dict[str, str], launcher: str) -> "subprocess.Popen[bytes]":
    """Start the script and wait until its commands have started."""
    programs = Path(job["EVOLVER_SHARED"]) / "venv" / "bin"
    (programs / "evolver-async").write_text(launcher)
    for program in programs.iterdir():
        program.chmod(0o755)
    script = subprocess.Popen(["bash", SLURM, "my-run", "gpu_cluster", "learner.lr=1e-5"], env=job)
    for name in ("launcher", "srun"):
        assert Path(f"{job['STARTED']}.{name}").read_text() == "\n"
    return script


@pytest.mark.process
@pytest.mark.parametrize(("code", "requeued"), [(143, True), (0, False)])
def test_the_signal_drains_both_and_requeues_what_is_not_finished(
    job: dict[str, str], code: int, requeued: bool
) -> None:
    script = start(job, STUB.format(name="launcher", code=code))
    script.send_signal(signal.SIGTERM)
    assert script.wait() == code
    lines = Path(job["LOG"]).read_text().splitlines()
    assert lines.count("launcher TERM") == lines.count("srun TERM") == 1
    assert ("scontrol requeue Incomplete 17" in lines) == requeued
    (train,) = [line for line in lines if line.startswith("launcher train ")]
    assert "run.name=my-run" in train and train.endswith("learner.lr=1e-5 --resume auto")


@pytest.mark.process
@pytest.mark.parametrize("code", [0, 3])
def test_the_job_ends_with_the_code_of_its_launcher(job: dict[str, str], code: int) -> None:
    launcher = f'#!/bin/bash\necho > "$STARTED.launcher"\nread -r < "$END"\nexit {code}\n'
    script = start(job, launcher)
    Path(job["END"]).write_text("\n")
    assert script.wait() == code
    lines = Path(job["LOG"]).read_text().splitlines()
    assert "srun TERM" in lines and not [line for line in lines if line.startswith("scontrol")]


# Kubernetes


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_match_the_api(version: str) -> None:
    for document in objects().values():
        validate(document, version, strict=True)


def test_the_schemas_refuse_what_does_not_exist() -> None:
    broken = objects()["StatefulSet"]
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 600
    with pytest.raises(ValidationError):
        validate(broken, VERSIONS[-1], strict=True)


def test_objects_refer_to_each_other() -> None:
    found = objects()
    assert {*found} == {"Service", "StatefulSet", "Deployment", "HorizontalPodAutoscaler"}
    service = found["Service"]
    (launcher,) = pod("StatefulSet")["containers"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert ports == {"buffer": 4000, "weights": 4001, "metrics": 9090}
    assert ports == {port["name"]: port["containerPort"] for port in launcher["ports"]}
    assert launcher["readinessProbe"]["tcpSocket"]["port"] == "buffer"
    name = service["metadata"]["name"]
    assert found["StatefulSet"]["spec"]["serviceName"] == name
    (actor,) = pod("Deployment")["containers"]
    host = f"{found['StatefulSet']['metadata']['name']}-0.{name}"
    assert f"tcp://{host}:4000" in actor["args"]
    assert f"weights.address=tcp://{host}.$(NAMESPACE).svc.cluster.local:4001" in launcher["args"]
    for kind in ("StatefulSet", "Deployment"):
        labels = found[kind]["spec"]["template"]["metadata"]["labels"]
        assert found[kind]["spec"]["selector"]["matchLabels"] == labels
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    images = {one["image"] for kind in ("StatefulSet", "Deployment") for one in containers(kind)}
    assert len(images) == 1
    assert f" -t {images.pop()} " in DOCKERFILE.read_text()
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "evolver-actors")
    assert "replicas" not in found["Deployment"]["spec"]


def containers(kind: str) -> list[dict[str, Any]]:
    return [*pod(kind)["initContainers"], *pod(kind)["containers"]]


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_mounts_have_volumes(kind: str) -> None:
    volumes = {volume["name"] for volume in pod(kind)["volumes"]}
    claims = objects()[kind]["spec"].get("volumeClaimTemplates", [])
    volumes |= {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for one in containers(kind) for mount in one["volumeMounts"]} == volumes


def test_pods_have_time_to_drain() -> None:
    assert pod("StatefulSet")["terminationGracePeriodSeconds"] > LEAST_DRAIN_S
    assert pod("Deployment")["terminationGracePeriodSeconds"] > Config().launch.drain_s


def test_the_autoscaler_uses_the_documented_metric_and_the_target_of_actors() -> None:
    (metric,) = objects()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["object"]["metric"]["name"]
    assert f"`{name}`" in SCALING and f"seriesQuery: '{name}{{" in KUBERNETES.read_text()
    assert metric["object"]["target"]["value"] == f"{Config().actors.target * 1000:.0f}m"
    assert metric["object"]["describedObject"]["name"] == objects()["Service"]["metadata"]["name"]


def secret_files(kind: str, made: Path) -> dict[str, Path]:
    """Files of the Secret's volume by path, from the keys in `made` as the file's head says."""
    (volume,) = [one["secret"] for one in pod(kind)["volumes"] if one["name"] == "secret"]
    assert volume["defaultMode"] == 0o440 and pod(kind)["securityContext"]["fsGroup"]
    head = KUBERNETES.read_text().replace("\\\n#", "")
    (command,) = re.findall(rf"create secret generic {volume['secretName']} (.*)", head)
    files: dict[str, Path] = {}
    for source in re.findall(r"--from-file=(\S+)", command):
        key, _, path = source.rpartition("=")
        path = made / path.removeprefix("keys/")
        paths = [*path.iterdir()] if path.is_dir() else [path]
        files |= {key or one.name: one for one in paths}
    items = volume.get("items", [{"key": key, "path": key} for key in files])
    assert {item["key"] for item in items} == {*files}
    return {item["path"]: files[item["key"]] for item in items}


@pytest.mark.process
def test_pods_can_use_their_keys(tmp_path: Path) -> None:
    """The init containers run on a volume as Kubernetes makes it: with files of mode 0440."""
    keys.make(tmp_path / "made", ["actors"])
    for kind in ("StatefulSet", "Deployment"):
        secret, copies = tmp_path / kind / "secret", tmp_path / kind / "keys"
        copies.mkdir(parents=True)
        for path, source in secret_files(kind, tmp_path / "made").items():
            (secret / path).parent.mkdir(parents=True, exist_ok=True)
            (secret / path).write_bytes(source.read_bytes())
            (secret / path).chmod(0o440)
        with pytest.raises(keys.KeysError, match="0440"):
            keys.client_keys(secret)
        (init,) = pod(kind)["initContainers"]
        script = init["args"][0].replace("/secret/", f"{secret}/", 1)
        script = re.sub(r"(?<=\s)/secret/", f"{secret}/", script)
        script = re.sub(r"(?<=\s)/keys", str(copies), script)
        subprocess.run([*init["command"], script], check=True)
        keys.client_keys(copies)
        if kind == "StatefulSet":
            keys.check_keys(copies)
            names = [path.stem for path in keys.listed(copies)]
            assert names == ["actors", "run"]


# systemd


@pytest.mark.process
def test_the_unit_is_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    program = tmp_path / "evolver-async"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = unit()["ExecStart"].split()[0]

    def verify(text: str) -> str:
        rendered_unit = tmp_path / UNIT.name
        rendered_unit.write_text(text.replace(command, str(program)))
        done = subprocess.run([analyze, "verify", rendered_unit], capture_output=True, text=True)
        return done.stderr

    text = UNIT.read_text()
    assert UNIT.name not in verify(text)
    broken = verify(text.replace("OOMPolicy=continue", "OOMPolicy=go\nKillMood=mixed"))
    assert "OOM policy" in broken and "KillMood" in broken


def test_the_unit_restarts_what_a_restart_can_mend_and_ends_as_a_launcher_does() -> None:
    service = unit()
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == {*FINAL}
    ends = {128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP}
    assert {int(code) for code in service["SuccessExitStatus"].split()} == ends
    assert service["Restart"] == "on-failure" and service["KillMode"] == "mixed"
    minutes = int(service["TimeoutStopSec"].removesuffix("min"))
    assert 60 * minutes > LEAST_DRAIN_S
    assert "StartLimitIntervalSec=0" in UNIT.read_text()


def test_the_unit_leaves_namespaces_to_the_sandbox() -> None:
    hindering = {"RestrictNamespaces", "SystemCallFilter", "PrivateDevices", "ProtectProc"}
    hindering |= {"ProtectKernelTunables", "PrivateUsers", "MemoryDenyWriteExecute"}
    assert not hindering & {*unit()}


def test_the_image_holds_the_package_and_the_user_of_the_pods() -> None:
    text = DOCKERFILE.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = re.findall(r"^COPY (.+) \S+$", text, re.M)
    for pattern in " ".join(copied).split():
        assert list(ROOT.glob(pattern)), pattern
    assert {"evolver_async", "actors", "learner", "configs"} <= set(copied)
    (everything, *let_in) = (ROOT / ".dockerignore").read_text().splitlines()
    assert everything == "*" and {one.removeprefix("!") for one in let_in} >= {
        *" ".join(copied).split()
    }
    extras = re.findall(r"EXTRAS=(\S+)", text)
    assert len(extras) == 2
    for extra in ",".join(extras).split(","):
        assert extra in project["optional-dependencies"]
    for constraints in re.findall(r"CONSTRAINTS=(\S+)", text):
        assert (ROOT / constraints).is_file()
    for kind in ("StatefulSet", "Deployment"):
        security = pod(kind)["securityContext"]
        assert f"USER {security['runAsUser']}:{security['runAsGroup']}\n" in text
    assert f":{__version__} ." in text
