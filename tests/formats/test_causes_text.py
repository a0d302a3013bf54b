"""Causes as people read them: under the verdict those that explain it, on request all, and what could not be known."""

import io
import json
from collections.abc import Mapping

from msgspec.structs import replace

from gpubench.formats.table import all_causes, named_causes, top_causes, unread_lines
from gpubench.measure.topo import examine
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Detail
from tests.cli.running import gpubench
from tests.fakes.planted import PLANTS, Job, simulated, with_ranks
from tests.formats.schema import VALIDATOR


def looked_at(job: Job) -> Report:
    return examine([Topology(node) for node in job.nodes], job.ranks)


def planted(id_: str, settings: Mapping[str, str] | None = None) -> Job:
    job = next(plant for plant in PLANTS if plant.id == id_).make()
    return with_ranks(job, lambda each: replace(each, environment={**each.environment, **(settings or {})}))


def test_what_explains_the_verdict_is_named_with_its_cure() -> None:
    report = looked_at(planted("fabric-manager-stopped", {"NCCL_PROTO": "LL"}))
    (top,) = top_causes(report)
    assert top.line == "cause fabric-manager-stopped (proven): nv-fabricmanager is not running"
    details = {label: text for label, text, _ in top.details}
    assert details["implies"] == "fabric-not-ready, peer-access-refused"
    assert Detail("try", "systemctl enable --now nvidia-fabricmanager", is_command=True) in top.details
    assert "settle" not in details, "what is proven needs no more proof"
    assert named_causes(report) == {"fabric-manager-stopped"}


def test_all_causes_come_with_what_they_are_and_a_link() -> None:
    report = looked_at(planted("fabric-manager-stopped", {"NCCL_PROTO": "LL"}))
    everything = list(all_causes(report))
    assert [cause.line.split()[1] for cause in everything] == ["fabric-manager-stopped", "nccl-algorithm-forced"]
    assert all({"what", "on", "try", "settle", "see"} <= {each.label for each in cause.details} for cause in everything)


def test_what_nobody_could_read_is_said_once() -> None:
    job = simulated("hgx-h100-8*2")
    lines = unread_lines(looked_at(replace(job, ranks=())))
    assert len(lines) == 1
    assert lines[0].endswith("no process of this node was examined")


def test_topo_causes_shows_causes_in_place_of_devices() -> None:
    arguments = ("topo", "--causes", "--simulate", "hgx-h200-4", "--fault", "gpu1:mig=on")
    result = gpubench(*arguments)
    assert result.returncode == 0
    assert "cause mig-on (by design, proven): MIG is on" in result.stdout
    assert "bus id" not in result.stdout
    document = json.load(io.StringIO(gpubench(*arguments, "--format", "json").stdout))
    VALIDATOR.validate(document)
    assert [(row["id"], row["implied_by"]) for row in document["causes"]] == [
        ("mig-on", None),
        ("peer-access-refused", "mig-on"),
    ]
    nothing = gpubench("topo", "--causes", "--simulate", "hgx-h200-4").stdout
    assert "no cause of a fallback or of slow paths was found" in nothing


def test_copies_and_collectives_name_what_the_facts_of_a_simulated_machine_show() -> None:
    for command in (("p2p", "--no-host", "--no-patterns"), ("allreduce", "--sizes", "1G")):
        said = gpubench(*command, "--simulate", "hgx-h200-2", "--fault", "gpu0:fabric=in_progress").stdout
        assert "cause fabric-not-ready (proven): fabric state in progress" in said, command
        assert "systemctl restart nvidia-fabricmanager" in " ".join(said.split())
