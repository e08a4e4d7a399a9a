"""The recipes of docs/spark.md, as a reader pastes them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import create_topic, read_topic
from tests.pyspark_tidelog.harness import FLAGS, ROOT, Spark, World
from tests.support.cluster_process import up_cluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]

PAGE = (ROOT / "docs" / "spark.md").read_text()
ORDERS = [{"id": number, "customer": ("ann", "bob", "eve")[number % 3], "total": number / 2} for number in range(90)]


def recipe(number: int) -> list[tuple[str, str]]:
    """The blocks of a recipe: language and text."""
    (text,) = re.findall(rf"(?ms)^### {number}\. .*?(?=^###? )", PAGE)
    return re.findall(r"(?ms)^```(\w+)\n(.*?)^```", text)


class Reader:
    """Someone who pastes recipes, with an address, a token and a folder of their own."""

    def __init__(self, world: World, place: Path) -> None:
        self._world = world
        self.bootstrap = world.bootstrap
        self.place = place
        self.spark = Spark(place / "spark")
        (place / "read-token").write_text(world.token)

    def run(self, number: int) -> str:
        """Everything that the recipe printed."""
        said = ""
        for language, text in recipe(number):
            text = text.replace("127.0.0.1:9092", self._world.bootstrap).replace("/data", str(self.place))
            text = text.replace("/etc/tidelog/read-token", str(self.place / "read-token"))
            if language == "python":
                told = self.spark.ask(call="tests.pyspark_tidelog.recipe_steps:run", **{"with": {"text": text}})
                assert "ok" in told, told["error"]
                said += told["ok"]
                continue
            assert language == "sh"
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "tidelog"
                said += self._world.cli(*arguments).text
        return said


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    place = tmp_path_factory.mktemp("data")
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        world = World(up)
        create_topic(world.bootstrap, "orders", 2)
        producer = Producer({"bootstrap.servers": world.bootstrap})
        for order in ORDERS:
            producer.produce("orders", key=str(order["customer"]), value=json.dumps(order))
        assert producer.flush(60) == 0
        world.upload()
        found = Reader(world, place)
        yield found
        found.spark.close()


def sums() -> dict[str, float]:
    found: dict[str, float] = {}
    for order in ORDERS:
        found[str(order["customer"])] = found.get(str(order["customer"]), 0.0) + float(str(order["total"]))
    return found


def test_there_are_five_recipes() -> None:
    assert re.findall(r"(?m)^### (\d)\. ", PAGE) == ["1", "2", "3", "4", "5"]


@pytest.mark.long
def test_sums_of_a_time_range(reader: Reader) -> None:
    said = reader.run(1)
    assert re.findall(r"\|\s*(\w+)\|\s*([\d.]+)\|", said) == [(name, str(sums()[name])) for name in sorted(sums())]


@pytest.mark.long
def test_a_topic_as_files_is_brought_up_to_date_once(reader: Reader) -> None:
    said = reader.run(2)
    assert sum(int(count) for count in re.findall(r"\|\s*\d+\|\s*(\d+)\|", said)) == len(ORDERS)
    assert reader.run(2) == said


@pytest.mark.long
def test_a_topic_is_enriched_to_another(reader: Reader) -> None:
    create_topic(reader.bootstrap, "orders-by-country", 1)
    reader.run(3)
    rows = [json.loads(value) for *_, value in read_topic(reader.bootstrap, "orders-by-country")]
    known = {"ann": "SE", "bob": "FR"}
    wanted = [{**order, "country": known[str(order["customer"])]} for order in ORDERS if order["customer"] in known]
    assert sorted(rows, key=lambda row: row["id"]) == wanted


@pytest.mark.long
def test_a_topic_as_a_table_is_asked_by_duckdb(reader: Reader) -> None:
    said = reader.run(4)
    assert re.findall(r"│ (\w{3})\s*│\s*([\d.]+) │", said) == [(name, str(sums()[name])) for name in sorted(sums())]


@pytest.mark.long
def test_a_file_is_loaded_into_a_topic_and_the_bucket_checked(reader: Reader) -> None:
    (reader.place / "customers.csv").write_text("name,city\nann,Umeå\nbob,Lyon\n")
    reader.run(5)
    rows = [(key, json.loads(value)) for *_, key, value in read_topic(reader.bootstrap, "customers", 2)]
    assert sorted(rows) == [(b"ann", {"name": "ann", "city": "Umeå"}), (b"bob", {"name": "bob", "city": "Lyon"})]
