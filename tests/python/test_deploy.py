"""deploy/: the YAML files have the fields of Kubernetes; the server runs in the image's root."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
if not DEPLOY.is_dir():
    pytest.skip("no sources: this tests a wheel", allow_module_level=True)
pytest.importorskip("tf_dynemb.serve", exc_type=ImportError)
yaml = pytest.importorskip("yaml")

import kserve.models  # noqa: E402
import kubernetes.client  # noqa: E402

import tf_dynemb as de  # noqa: E402
from tf_dynemb.serve import __main__ as main  # noqa: E402
from tf_dynemb.serve import server  # noqa: E402

SCALARS = {
    "str": str,
    "int": int,
    "bool": bool,
    "datetime": str,
    "ResourceQuantity": (str, int),
    "object": (str, int),  # a number or a name, such as a port
}
FREE = {"annotations", "labels", "limits", "matchLabels", "requests", "selector"}


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


DOCUMENTS = [
    pytest.param(document, id=f"{file.stem}-{document['kind']}")
    for file in sorted(DEPLOY.glob("*.yaml"))
    for document in read(file.name)
]


def document(name: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in read(name) if each["kind"] == kind]
    return found


def faults(document: dict[str, Any]) -> list[str]:
    """Returns what is not as Kubernetes and KServe define it.

    The classes of their clients name the fields of each object, with types. Reading a document
    with these clients checks neither.
    """
    version = document["apiVersion"].rpartition("/")[2]
    return list(_faults(document, version.capitalize() + document["kind"], ""))


def _faults(value: Any, kind: str, place: str) -> Iterator[str]:
    if match := re.fullmatch(r"list\[(.+)\]", kind, re.IGNORECASE):
        if not isinstance(value, list):
            yield f"{place} is not a list"
            return
        for number, each in enumerate(value):
            yield from _faults(each, match[1], f"{place}[{number}]")
    elif match := re.fullmatch(r"dict[(\[]str, (.+)[)\]]", kind, re.IGNORECASE):
        if not isinstance(value, dict):
            yield f"{place} is not a mapping"
            return
        for key, each in value.items():
            yield from _faults(each, match[1], f"{place}.{key}")
    elif kind in SCALARS:
        if not isinstance(value, SCALARS[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{place} is not of the type {kind}: {value!r}"
    elif not isinstance(value, dict):
        yield f"{place} is not a {kind}"
    else:
        model = getattr(kserve.models, kind, None) or getattr(kubernetes.client, kind)
        names = {name: attribute for attribute, name in model.attribute_map.items()}
        for key in value.keys() - names.keys():
            yield f"{place}.{key} is not a field of {kind}"
        known = {names[key]: each for key, each in value.items() if key in names}
        try:
            model(**known)
        except ValueError as error:  # such as a field that is required
            yield f"{place}: {error}"
        for attribute, each in known.items():
            inner = f"{place}.{model.attribute_map[attribute]}"
            yield from _faults(each, model.openapi_types[attribute], inner)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_fields_are_those_of_kubernetes(document):
    assert faults(document) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_misspelt_field_is_found_everywhere(document):
    planted = 0
    for path in _fields(document):
        wrong = copy.deepcopy(document)
        parent = wrong
        for key in path[:-1]:
            parent = parent[key]
        parent[f"{path[-1]}s"] = parent.pop(path[-1])
        assert any(f".{path[-1]}s is not a field" in fault for fault in faults(wrong)), path
        planted += 1
    assert planted >= 3


def _fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all fields whose names Kubernetes defines."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _fields(each, (*path, number))
    elif isinstance(value, dict) and not (path and path[-1] in FREE and "matchLabels" not in value):
        for key, each in value.items():
            if path or key not in ("apiVersion", "kind"):
                yield (*path, key)
            yield from _fields(each, (*path, key))


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("replicas",), "2", "replicas is not of the type int"),
        (("selector",), None, "selector"),
        (("template", "spec", "containers", 0, "name"), None, "name"),
        (("template", "spec", "containers", 0, "args"), "--help", "args is not a list"),
    ],
)
def test_a_wrong_value_is_found(path, value, fault):
    wrong = document("kubernetes.yaml", "Deployment")
    parent = wrong["spec"]
    for key in path[:-1]:
        parent = parent[key]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    assert any(fault in each for each in faults(wrong)), faults(wrong)


class Image(NamedTuple):
    """What deploy/Dockerfile says of the image."""

    extras: list[str]
    environment: dict[str, str]
    user: str
    ports: list[int]
    health: list[str]
    entry: list[str]


def instructions() -> list[list[tuple[str, str]]]:
    """Returns the instructions of deploy/Dockerfile, of each stage."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    stages: list[list[tuple[str, str]]] = []
    for name, _, rest in (line.partition(" ") for line in lines if line.strip()):
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest))
    return stages


def image() -> Image:
    build, final = instructions()
    has = dict(final)
    extras = dict(line.split("=") for name, line in build if name == "ARG")["EXTRAS"]
    return Image(
        extras.split(","),
        dict(each.split("=", 1) for each in shlex.split(has["ENV"])),
        has["USER"],
        [int(port) for port in has["EXPOSE"].split()],
        json.loads(has["HEALTHCHECK"].partition("CMD ")[2]),
        json.loads(has["ENTRYPOINT"]),
    )


def test_the_final_image_has_no_compilers():
    build, final = instructions()
    assert dict(build)["FROM"].split()[0] == dict(final)["FROM"]
    assert re.fullmatch(r"python:3\.11-slim(-\w+)?", dict(final)["FROM"])
    assert "RUN" not in dict(final)
    runs = [line for name, line in build if name == "RUN"]
    assert not any("apt-get" in line for line in runs)
    (install,) = [line for line in runs if "pip" in line and "install" in line]
    assert "--only-binary :all:" in install
    assert {"cpu", "serve"} <= set(image().extras)


def pods() -> list[Any]:
    """Returns the container, and the pod, of each way to deploy."""
    deployment = document("kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]
    runtime = document("serving_runtime.yaml", "ServingRuntime")["spec"]
    predictor = document("inference_service.yaml", "InferenceService")["spec"]["predictor"]
    (container,) = copy.deepcopy(runtime["containers"])
    # As KServe joins them: args one after the other, and then names as a template of Go.
    args = container["args"] + predictor["model"]["args"]
    container["args"] = [each.replace("{{.Name}}", "ctr") for each in args]
    return [
        pytest.param(deployment["containers"][0], deployment, id="kubernetes"),
        pytest.param(container, {**runtime, **predictor}, id="kserve"),
    ]


@pytest.mark.parametrize(("container", "pod"), pods())
def test_the_pod_fits_the_server(container, pod):
    built = image()
    parsed = main.parse(built.entry[3:] + container["args"])
    assert built.entry[:3] == ["python", "-m", "tf_dynemb.serve"]
    assert [name for name, _ in parsed.model + parsed.follow] == ["ctr", "ctr"]
    assert dict(parsed.follow)["ctr"].startswith("s3://")
    assert parsed.host == "0.0.0.0"
    ports = [parsed.http_port, parsed.grpc_port]
    assert built.ports == ports == [each["containerPort"] for each in container["ports"]]
    assert f":{parsed.http_port}/v2/health/live" in built.health[-1]
    for probe, path in (("startup", "live"), ("liveness", "live"), ("readiness", "ready")):
        asked = container[f"{probe}Probe"]["httpGet"]
        assert asked["path"] == f"/v2/health/{path}"
        assert asked["port"] in (parsed.http_port, "http")

    # All that is written is in a volume at /tmp.
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["mountPath"] == built.environment["HOME"] == "/tmp"
    assert "emptyDir" in volume
    assert parsed.cache.is_relative_to("/tmp")
    security = container["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == built.user
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    until_killed = pod["terminationGracePeriodSeconds"]
    assert until_killed > parsed.drain_seconds + server._GRACE_SECONDS


def test_names_in_the_files_agree():
    service = document("kubernetes.yaml", "Service")["spec"]
    deployment = document("kubernetes.yaml", "Deployment")["spec"]
    template = deployment["template"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {each["name"] for each in template["spec"]["containers"][0]["ports"]}
    assert {each["targetPort"] for each in service["ports"]} == ports
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(image().ports[0])

    runtime = document("serving_runtime.yaml", "ServingRuntime")
    predictor = document("inference_service.yaml", "InferenceService")["spec"]["predictor"]
    model, spec = predictor["model"], runtime["spec"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [(each["name"], each["version"]) for each in spec["supportedModelFormats"]]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
    assert model["protocolVersion"] in spec["protocolVersions"]
    assert spec["containers"][0]["name"] == "kserve-container"
    for file, pod in (("kubernetes", template["spec"]), ("inference_service", predictor)):
        account = document(f"{file}.yaml", "ServiceAccount")
        assert pod["serviceAccountName"] == account["metadata"]["name"]


# The root file system of the image's base, without the Python that the image compiles.
SUITE = "bookworm"
TOOLS = ("mmdebstrap", "unshare", "nsenter")
MOUNTS = ("opt/venv", "opt/site", "opt/tf_dynemb", "mnt/models")

# Arguments: the root, what is mounted at MOUNTS, and what is run.
ENTER = f"""
set -e
root=$1; shift
mount --bind "$root" "$root"
for place in {" ".join(MOUNTS)}; do
  mount --bind "$1" "$root/$place"
  mount -o remount,bind,ro "$root/$place"
  shift
done
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
exec chroot "$root" "$@"
"""


@pytest.fixture(scope="module")
def debian() -> pathlib.Path:
    """A root file system of Debian with Python, which is kept for later runs."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and {', '.join(missing or TOOLS)}")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the packages are for another Python than that of Debian 12, 3.11")
    if subprocess.run(["unshare", "--mount", "true"]).returncode != 0:
        pytest.skip("namespaces are not permitted")
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    kept = cache / "tf_dynemb" / "rootfs" / SUITE
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = pathlib.Path(tempfile.mkdtemp(dir=kept.parent))
        command = ["mmdebstrap", "--variant=minbase", "--include=python3", SUITE, str(partial)]
        try:
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"mmdebstrap: {made.stderr.strip()[-200:]}")
            for place in MOUNTS:
                (partial / place).mkdir(parents=True)
            partial.chmod(0o755)
            partial.rename(kept)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return kept


def installed_for(extras: list[str]) -> set[str]:
    """Returns the names in site-packages of what pip installs with tf_dynemb and its extras."""
    import tomllib
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(need for each in extras for need in optional[each])]
    pending, names, seen = [Requirement(each) for each in wanted], set(), set()
    while pending:
        need = pending.pop()
        if str(need) in seen:
            continue
        seen.add(str(need))
        package = metadata.distribution(need.name)
        names |= {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}
        for inner in map(Requirement, package.requires or ()):
            has = ({"extra": each} for each in ("", *need.extras))
            if inner.marker is None or any(inner.marker.evaluate(each) for each in has):
                pending.append(inner)
    return names


def make_venv(folder: pathlib.Path, extras: list[str]) -> None:
    """Makes the /opt/venv of the image, of links to packages at /opt/site and /opt/tf_dynemb."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    for name in installed_for(extras):
        (packages / name).symlink_to(f"/opt/site/{name}")
    (packages / "tf_dynemb").symlink_to("/opt/tf_dynemb")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to("/usr/bin/python3")
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")


class Container:
    """The server in the image's root file system, as a runtime of containers starts it.

    It has the image's entry point, user and environment, no capabilities, and can write in /tmp
    alone. Unlike in a container, its network is that of the machine.
    """

    def __init__(
        self,
        root: pathlib.Path,
        mounted: list[pathlib.Path],
        args: list[str],
        environment: dict[str, str],
        log: pathlib.Path,
    ) -> None:
        built = self._image = image()
        user, group = built.user.split(":")
        variables = {**built.environment, **environment}
        self._as_user = ["/usr/bin/env", "-i", *(f"{n}={v}" for n, v in variables.items())]
        self._as_user += ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        self._as_user += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
        enter = ["unshare", "--mount", "--propagation=private", "bash", "-c", ENTER, "-"]
        program = [*self._as_user, *built.entry, "--host=127.0.0.1", "--http-port=0", *args]
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*enter, str(root), *map(str, mounted), *program], stdout=output, stderr=output
            )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as root."""
        enter = ["nsenter", f"--target={self.process.pid}", "--mount", "--root", "--wd", "--"]
        return subprocess.run([*enter, *command], capture_output=True, text=True)

    def is_healthy(self) -> bool:
        """Returns what the image's HEALTHCHECK says."""
        port = self.url().rpartition(":")[2]
        check = [each.replace(":8080/", f":{port}/") for each in self._image.health]
        return self.run(*self._as_user, *check).returncode == 0

    def url(self) -> str:
        """Returns the URL of the server, when all models answer."""
        self.wait_until(lambda: "REST on " in self.log())
        return re.search(r"REST on (\S+),", self.log())[1]

    def ask(self, path: str, body: Any = None) -> Any:
        """Returns the answer to a request."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.url() + path, data, 10) as answer:
            return json.loads(answer.read())

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Waits until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.1)

    def log(self) -> str:
        return self._log.read_text()


@pytest.mark.slow
def test_the_server_runs_in_the_image(debian, disk_folder, s3):
    import fsspec
    import tensorflow as tf
    from served_weights_helpers import IDS, change, dense_model, export

    from tf_dynemb.chains.publish import publish

    def scores(name):
        answer = container.ask(f"/v1/models/{name}:predict", {"instances": IDS.tolist()})
        return np.array(answer["predictions"])

    def is_served(name):
        return np.allclose(scores(name), model.predict_on_batch(IDS), rtol=1e-5, atol=1e-6)

    model = dense_model()
    change(model)
    _, chain = export(model, disk_folder)
    fsspec.filesystem("s3").put(f"{disk_folder / 'model'}/", f"{s3}/models/7/", recursive=True)
    publish(f"{s3}/chain", from_=chain)
    make_venv(disk_folder / "venv", image().extras)
    disk_folder.chmod(0o755)
    site, package = pathlib.Path(tf.__file__).parents[1], pathlib.Path(de.__file__).parent
    mounted = [disk_folder / "venv", site, package, disk_folder / "model"]
    args = ["--model=mounted=/mnt/models", f"--model=stored={s3}/models", "--grpc-port=0"]
    args += [f"--follow=stored={s3}/chain", "--poll-seconds=0.2", "--drain-seconds=1"]
    names = ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION")
    environment = {f"AWS_{name}": os.environ[f"AWS_{name}"] for name in names}
    container = Container(debian, mounted, args, environment, disk_folder / "log")
    process = container.process
    try:
        assert container.ask("/v2/health/ready") == {"ready": True}
        assert container.is_healthy()
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(r"^Uid:\s+65534\s+65534\s+65534\s+65534$", status, re.M)
        assert re.search(r"^CapBnd:\s+0+$", status, re.M)
        for place in ("/", "/opt/venv", "/mnt/models"):
            assert "Read-only" in container.run("touch", f"{place}/file").stderr
        assert container.run("sh", "-c", "! command -v cc gcc g++ make").returncode == 0
        assert container.run("ls", "/tmp/tf_dynemb").stdout.split() == ["chains", "lock", "models"]

        assert is_served("mounted")
        assert is_served("stored")
        change(model, seed=2)
        de.incremental_dump(chain, model)
        publish(f"{s3}/chain", from_=chain)
        container.wait_until(lambda: is_served("stored"))
        assert not is_served("mounted")

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, container.log()
        assert container.log().endswith("ended\n")
    finally:
        process.kill()
        process.wait()
