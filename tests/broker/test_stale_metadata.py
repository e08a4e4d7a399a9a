"""A broker whose copy of the metadata does not follow, though controllers answer everything else that it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tidelog.cli.client import http_json
from tidelog.controller.image import follower
from tidelog.controller.image.image import Delta, Image
from tidelog.runtime.errors import CorruptData

pytestmark = pytest.mark.timeout(120)


def test_metadata_that_stay_behind_are_a_problem_until_they_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It told clients of topics and leaders as they had been, for good, and only its log had a line."""
    monkeypatch.setattr(follower, "RETRY_CAP_S", 0.1)
    with Cluster(tmp_path, brokers=2) as cluster:
        url = cluster.nodes[2].parts.servers.admin.url
        stuck = cluster.nodes[2].controller.image

        def told() -> list[str]:
            return [each for each in http_json(url, "/status")["problems"] if "metadata copy" in each]

        apply = Image.apply

        def apply_or_not(image: Image, delta: Delta) -> None:
            if image is stuck:
                raise CorruptData("this delta does not decode")
            apply(image, delta)

        assert told() == []
        with monkeypatch.context() as patch:
            patch.setattr(Image, "apply", apply_or_not)
            cluster.run(cluster.nodes[1].controller.create_topic("t", 1, {}))
            wait_until(lambda: bool(told()), "the status tells of it", 20)
            health = http_json(url, "/status")["health"]["metadata copy"]
            assert not health["healthy"]
        wait_until(lambda: not told(), "it follows")
        assert "t" in stuck.topic_ids
