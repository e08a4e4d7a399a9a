"""Transactions: the state machine of a transactional id, and the record formats of `__transaction_state`.

Invariants: a transaction is decided by its confirmed Prepare record, once; nobody is told of a change whose record is
not confirmed; a transaction is complete only when each of its partitions has its marker. The state machine is sans-I/O.

May import: `tidelog.broker.partitions` and the packages below. Entry: `tidelog.broker.txn.state.TransactionalId`.
"""
