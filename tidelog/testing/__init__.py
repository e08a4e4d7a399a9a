"""Real brokers for the tests of an application: in this process or in child processes, and faults by call.

    from tidelog.testing import LocalBroker

    with LocalBroker() as broker:
        broker.create_topic("orders")
        producer = Producer({"bootstrap.servers": broker.bootstrap})

`LocalBroker` is one broker with its controller, `LocalCluster` several; `AsyncLocalBroker` and `AsyncLocalCluster` are
the same for `async with`. The pytest plugin, `tidelog.testing.plugin`, makes fixtures of them. What runs where is in
docs/testing.md, and why in docs/design/0027-testing.md.

Public: the names of `__all__` here, and the fixtures, markers and settings of the plugin. Nothing else of Tidelog is an
interface for other projects.

Invariants: what is started is the product itself, by its own entry, with settings that a configuration file could
have; nothing of it is left when the context is left or the process ends, however it ends; nothing heavy is imported
before the first broker starts.

May import: all other packages. Entry: `LocalBroker`, `LocalCluster`.
"""

from tidelog.testing.asynchronous import AsyncLocalBroker, AsyncLocalCluster
from tidelog.testing.bucket_faults import LocalBucket
from tidelog.testing.clock import LocalClock
from tidelog.testing.local import LocalBroker, LocalCluster
from tidelog.testing.options import BrokerEnded, NotPossibleHere

__all__ = [
    "AsyncLocalBroker",
    "AsyncLocalCluster",
    "BrokerEnded",
    "LocalBroker",
    "LocalBucket",
    "LocalClock",
    "LocalCluster",
    "NotPossibleHere",
]
