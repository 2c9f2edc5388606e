"""The files in docker/ and grafana/provisioning/. No container engine runs here, so this checks what can be checked
without one: that the files agree with each other and with the program, and that the commands in them work as they are.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.cli import command_parser
from gateway.configfile import load
from tests.grafana.processes import ROOT, free_port, gateway_process, process, wait_for

DOCKER = ROOT / "docker"
GRAFANA = ROOT / "grafana"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTINGS_FILE = DOCKER / "gateway.yaml"
COMMENTED_OUT = re.compile(r"^( *)#(?=\S)", re.MULTILINE)  # settings to switch on, as in config/gateway.yaml


def instructions() -> list[tuple[str, str]]:
    """Name and argument of each instruction of the Dockerfile, comments left out, continued lines joined."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines.splitlines() if line)]


def last_stage() -> dict[str, list[str]]:
    """The final image's instructions by name."""
    found: dict[str, list[str]] = {}
    for name, rest in instructions():
        if name == "FROM":
            found.clear()
        found.setdefault(name, []).append(rest)
    return found


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file or folder into the build."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch.fnmatch(path.split("/", maxsplit=1)[0], pattern):
            sent = line.startswith("!")
    return sent


def arguments_of(command: list[str]) -> argparse.Namespace:
    """What our own command line understands; pytest.fail where it does not."""
    try:
        return command_parser(command[0]).parse_args(command)
    except SystemExit:
        pytest.fail(f"`firsttoken {shlex.join(command)}` is not a command")


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


# -- the image ---------------------------------------------------------------------------------------------------------


def test_what_the_image_is_built_from_exists_and_is_sent_to_the_builder() -> None:
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    sources = [source for sources in copied for source in sources]
    assert {"pyproject.toml", "gateway", "README.md", "LICENSE"} == {*sources}
    assert all((ROOT / source).exists() and is_sent(source) for source in sources)


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", ".env", "docker/compose.yaml", "tests/conftest.py"]
)
def test_nothing_else_is_sent_to_the_builder(path: str) -> None:
    assert not is_sent(path)


def test_the_image_runs_as_nobody_special_and_stops_on_sigterm() -> None:
    stage = last_stage()
    user, group = stage["USER"][-1].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert f"--uid {user}" in stage["RUN"][0]
    assert stage["STOPSIGNAL"] == ["SIGTERM"]


def test_the_image_holds_no_compiler_no_installer_and_no_settings() -> None:
    stage = last_stage()
    assert not re.search(r"\b(apt-get|install)\b", " ".join(stage["RUN"]))
    assert "pip uninstall" in stage["RUN"][0]
    assert stage["COPY"] == ["--from=build /opt/firsttoken /opt/firsttoken"]
    assert all(rest.startswith("python:3.12-slim") for name, rest in instructions() if name == "FROM")


def test_the_image_starts_the_gateway_itself_so_that_signals_reach_it() -> None:
    stage = last_stage()
    assert json.loads(stage["ENTRYPOINT"][0]) == ["firsttoken"]
    arguments = arguments_of(json.loads(stage["CMD"][0]))
    mounted = [str(volume) for volume in SERVICES["gateway"]["volumes"]]
    assert mounted == [f"./gateway.yaml:{arguments.config}:ro"]
    assert f"FIRSTTOKEN_CONFIG={arguments.config}" in stage["ENV"][0]
    assert (arguments.host, arguments.port) == (None, None)


def health_check(port: int) -> int:
    """Exit code of the image's own check, on another port."""
    (text,) = last_stage()["HEALTHCHECK"]
    command = json.loads(text[text.index("CMD") + 3 :])
    assert command[0] == "python"
    snippet = command[-1].replace("8080", str(port))
    assert snippet != command[-1]
    proxied = {**os.environ, "http_proxy": "http://127.0.0.1:9"}  # the check must not ask a proxy
    return subprocess.run(
        [sys.executable, *command[1:-1], snippet], env=proxied, stderr=subprocess.DEVNULL, timeout=20, check=False
    ).returncode


def test_the_health_check_asks_the_gateway() -> None:
    port = free_port()
    assert health_check(port) != 0
    with gateway_process(
        str(SETTINGS_FILE), "--host", "127.0.0.1", port=port, environment={"MODEL_URL": "http://127.0.0.1:9"}
    ):
        assert health_check(port) == 0


def test_the_health_check_is_shorter_than_its_own_limit() -> None:
    (text,) = last_stage()["HEALTHCHECK"]
    limit = re.search(r"--timeout=(\d+)s", text)
    own = re.search(r"timeout=(\d+)\)", text)
    assert limit is not None
    assert own is not None
    assert int(own[1]) < int(limit[1])


# -- the settings ------------------------------------------------------------------------------------------------------


def test_the_settings_load_without_environment_and_without_warnings() -> None:
    loaded = load(SETTINGS_FILE, {})
    assert loaded.warnings == ()
    listen = loaded.settings.listen
    assert (listen.host, f"{listen.port}") == ("0.0.0.0", *last_stage()["EXPOSE"])
    assert listen.drain_timeout_s < seconds(SERVICES["gateway"]["stop_grace_period"])
    assert loaded.settings.upstreams["model"].url == "http://model:8000"


def test_the_settings_with_keys_are_right(tmp_path: Path) -> None:
    text = SETTINGS_FILE.read_text(encoding="utf-8").replace("auth: none\n", "", 1)
    path = tmp_path / "gateway.yaml"
    path.write_text(COMMENTED_OUT.sub(r"\1", text), encoding="utf-8")
    loaded = load(path, {"APP_KEY": "one", "METRICS_KEY": "two"})
    assert loaded.warnings == ()
    app, prometheus = loaded.settings.keys
    assert (app.admin, app.routes) == (False, None)
    assert (prometheus.admin, prometheus.routes) == (True, ())


def test_every_variable_of_the_settings_reaches_the_container() -> None:
    wanted = {*re.findall(r"\$\{(\w+)", SETTINGS_FILE.read_text(encoding="utf-8"))}
    assert wanted == {*SERVICES["gateway"]["environment"]}


# -- compose -----------------------------------------------------------------------------------------------------------


def test_the_files_that_compose_mounts_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DOCKER / source).exists(), volume


def test_compose_builds_the_image_once_and_pins_all_others() -> None:
    build = SERVICES["gateway"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
    for name, service in SERVICES.items():
        if service["image"] == SERVICES["gateway"]["image"]:
            assert name == "gateway" or service["pull_policy"] == "never"
        else:
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])


def test_ports_are_published_to_this_machine_only() -> None:
    """The gateway is open as it comes, and so is Prometheus."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_containers_that_run_our_image_cannot_write_to_it() -> None:
    for name in ("gateway", "model", "traffic"):
        assert SERVICES[name]["read_only"] is True
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["tmpfs"] == ["/tmp"]


def test_the_demo_profile_adds_a_model_and_callers_that_know_its_name() -> None:
    assert {name for name, service in SERVICES.items() if service.get("profiles") == ["demo"]} == {"model", "traffic"}
    from gateway.cli.sim import profile_of

    arguments = arguments_of(SERVICES["model"]["command"])
    model = re.search(r'^MODEL = "(.+)"$', (DOCKER / "traffic.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert model is not None
    assert model[1] in profile_of(arguments).models
    assert f"http://model:{arguments.port}" == load(SETTINGS_FILE, {}).settings.upstreams["model"].url


# -- Prometheus and Grafana --------------------------------------------------------------------------------------------

PROMETHEUS: dict[str, Any] = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
PROVISIONING = GRAFANA / "provisioning"
SOURCE: dict[str, Any] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))
PROVIDER: dict[str, Any] = yaml.safe_load((PROVISIONING / "dashboards" / "firsttoken.yaml").read_text(encoding="utf-8"))


def test_prometheus_scrapes_the_gateway() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"gateway:{last_stage()['EXPOSE'][0]}"]}]


@pytest.mark.service
def test_prometheus_accepts_its_settings_also_with_a_key(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("there is no `promtool` here (Debian's package `prometheus` has it)")
    key = tmp_path / "key"
    key.write_text("secret")
    text = (DOCKER / "prometheus.yml").read_text(encoding="utf-8")
    with_key = COMMENTED_OUT.sub(r"\1", text).replace("/run/secrets/metrics_key", str(key))
    assert with_key.count(str(key)) == 1
    for number, version in enumerate((text, with_key)):
        path = tmp_path / f"{number}.yml"
        path.write_text(version, encoding="utf-8")
        subprocess.run([promtool, "check", "config", str(path)], check=True)


def test_compose_with_a_key_hands_it_to_prometheus() -> None:
    text = COMMENTED_OUT.sub(r"\1", (DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    with_key = yaml.safe_load(text)
    assert with_key["services"]["prometheus"]["secrets"] == [*with_key["secrets"]] == ["metrics_key"]
    assert with_key["secrets"]["metrics_key"] == {"environment": "METRICS_KEY"}


def test_grafana_asks_that_prometheus_and_knows_how_often_it_scrapes() -> None:
    (source,) = SOURCE["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    assert SERVICES[str(url.hostname)]["ports"][0].endswith(f":{url.port}")
    assert source["isDefault"]
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_grafana_finds_the_dashboard() -> None:
    (provider,) = PROVIDER["providers"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    assert mounts["../grafana/provisioning"] == "/etc/grafana/provisioning"
    assert mounts["../grafana/dashboards"] == provider["options"]["path"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home.parent == Path(provider["options"]["path"])
    assert (GRAFANA / "dashboards" / home.name).exists()


# -- the demo, without containers --------------------------------------------------------------------------------------


def simulated(port: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "gateway", "sim", "--port", str(port), "--profile", "demo", "--speed", "20", *more]


@pytest.mark.slow
def test_the_demos_callers_bring_every_panel_something_to_show() -> None:
    model, port = free_port(), free_port()
    environment = {"MODEL_URL": f"http://127.0.0.1:{model}"}
    with (
        process(*simulated(model)) as started,
        gateway_process(str(SETTINGS_FILE), "--host", "127.0.0.1", port=port, environment=environment) as url,
    ):
        wait_for(f"http://127.0.0.1:{model}/health", started)
        callers = subprocess.run(
            [sys.executable, str(DOCKER / "traffic.py"), url, "6"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (callers.returncode, callers.stdout, callers.stderr) == (0, "", "")
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    seen = {(sample.name, *sample.labels.values()) for f in families for sample in f.samples if sample.value}
    for expected in (
        {"gateway_requests_total", "fast", "complete"},
        {"gateway_requests_total", "default", "complete"},
        {"gateway_policy_changes_total", "fast", "thinking"},
        {"gateway_clean_changes_total", "dashes"},
        {"gateway_ttft_seconds_count", "default"},
        {"gateway_wait_seconds_sum", "prefill"},
    ):
        assert any(expected <= {*sample} for sample in seen), expected


def test_a_stop_lets_a_running_answer_end(tmp_path: Path) -> None:
    """SIGTERM, as `docker stop` sends it, with the settings of docker/."""
    model, port = free_port(), free_port()
    command = [sys.executable, "-m", "gateway", "serve", str(SETTINGS_FILE), "--host", "127.0.0.1", "--port", str(port)]
    environment = {"MODEL_URL": f"http://127.0.0.1:{model}"}
    with (
        process(*simulated(model, "--set", "thinking_tokens=400,400")) as simulator,
        process(*command, environment=environment) as gateway,
    ):
        wait_for(f"http://127.0.0.1:{model}/health", simulator)
        wait_for(f"http://127.0.0.1:{port}/health", gateway)
        body = {"model": "deepseek-v4", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            first = answer.readline()
            gateway.send_signal(signal.SIGTERM)
            rest = cast(bytes, answer.read())
        assert first.startswith(b"data: ")
        assert rest.rstrip().endswith(b"data: [DONE]")
        waiting = threading.Timer(10, gateway.kill)
        waiting.start()
        ended = gateway.wait()
        waiting.cancel()
        assert ended in (0, -signal.SIGTERM)  # as process 1 of a container: 0
