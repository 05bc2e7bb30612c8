"""One list of dependencies: environment.yml, the Makefile and CI install from pyproject.toml."""

import os
import re
import subprocess
import sys
import tomllib

import yaml

from musalib.runs import repository_root

ROOT = repository_root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_installs_the_project_and_repeats_no_version():
    text = (ROOT / "environment.yml").read_text()
    environment = yaml.safe_load(text)
    assert environment["name"] == PROJECT["name"] == "musalib"
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-e .[gpu,dev]"]
    assert {"gpu", "dev"} <= PROJECT["optional-dependencies"].keys()
    assert "# - -e .[dev]" in text, "the line for machines without a GPU stands beside it"
    conda = {re.split(r"[<>=]", e)[0] for e in environment["dependencies"] if isinstance(e, str)}
    python_packages = {re.split(r"[\[<>=]", e)[0] for e in PROJECT["dependencies"]}
    assert conda & python_packages <= {"ninja"}
    (python,) = [e for e in environment["dependencies"] if isinstance(e, str) and e.startswith("python")]
    assert python.startswith(f"python{PROJECT['requires-python']}")


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"] and lines[-1] == "make test"


def test_hooks_need_no_network_and_keep_tags():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    entries = [hook["entry"] for hook in hooks["repos"][0]["hooks"]]
    assert any(e.startswith("ruff") for e in entries) and any(e.startswith("nbstripout") for e in entries)


def make(*arguments, **environment):
    command = ["make", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_every_target_sets_up_first():
    for target in ("run", "test", "check", "figures", "lab"):
        plan = make("-n", target, "VENV=build/absent-venv")
        assert plan.returncode == 0, plan.stderr
        assert "-m venv build/absent-venv" in plan.stdout and "-e '.[dev]'" in plan.stdout


def test_setup_without_a_compiler_stops_with_the_fix(tmp_path):
    for tool in ("make", "sh"):
        where = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
        (tmp_path / tool).symlink_to(where)
    done = make("setup", "VENV=build/absent-venv", f"PYTHON={sys.executable}", PATH=str(tmp_path))
    assert done.returncode != 0 and "install g++ 11 or newer" in done.stderr
    old = make("setup", "VENV=build/absent-venv", "PYTHON=python1")
    assert old.returncode != 0 and "python1 was not found" in old.stderr
