"""The mutations: each switches off one protection of the real code, and the simulator must find it.

`tidelog simulate --mutations all` looks for all of them (docs/simulation.md). Mutations are defined and applied in
`tidelog.simulation.mutants.mutant`; the modules `in_*` have those of one package each, of transactions,
of log compaction, or of snapshots and branches.

Entry: `MUTATIONS`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.in_broker import MUTATIONS_IN_BROKER
from tidelog.simulation.mutants.in_compaction import MUTATIONS_IN_COMPACTION
from tidelog.simulation.mutants.in_controller import MUTATIONS_IN_CONTROLLER
from tidelog.simulation.mutants.in_replication import MUTATIONS_IN_REPLICATION
from tidelog.simulation.mutants.in_snapshots import MUTATIONS_IN_SNAPSHOTS
from tidelog.simulation.mutants.in_storage import MUTATIONS_IN_STORAGE
from tidelog.simulation.mutants.in_stream import MUTATIONS_IN_STREAM
from tidelog.simulation.mutants.in_transactions import MUTATIONS_IN_TRANSACTIONS

MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        *MUTATIONS_IN_STREAM,
        *MUTATIONS_IN_STORAGE,
        *MUTATIONS_IN_REPLICATION,
        *MUTATIONS_IN_CONTROLLER,
        *MUTATIONS_IN_BROKER,
        *MUTATIONS_IN_TRANSACTIONS,
        *MUTATIONS_IN_COMPACTION,
        *MUTATIONS_IN_SNAPSHOTS,
    )
}
