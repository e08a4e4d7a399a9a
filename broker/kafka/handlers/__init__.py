"""Handlers of Kafka requests, one module for each family of APIs.

A handler takes a `RequestContext` and a request, and returns a response. Requests and responses are classes of
`tidelog.broker.kafka.wire.messages`, one for all versions of a message. Produce and Fetch have classes with their own
codecs (`tidelog.broker.kafka.wire.produce`, `tidelog.broker.kafka.wire.fetch`), and Metadata returns an encoded
body.

There are two kinds of handlers:

- `async` functions. Each starts when all earlier requests of its connection are answered, and runs in a task.
- Plain functions that return an awaitable: Produce and Fetch. They append or read before they return, and return an
  `Answer` that is set now or later, without a task; only if they must wait for room (Produce) or for data (Fetch), they
  return a coroutine. Produce also starts while earlier requests of its connection wait for their responses, which are
  still sent in order. Fetch does not: it is registered as `sequential`.

Invariants: no `TidelogError` leaves a handler, it becomes a code of the protocol for each partition; a handler serves
every version that it is registered for.

Each module lists its APIs in `APIS`, built with `serve`, which checks that a handler takes the request class of its
API. `tidelog.broker.kafka.apis` collects these lists, and `tidelog.broker.kafka.server` serves them and ApiVersions.

May import: `tidelog.broker.kafka.wire`, `tidelog.broker.kafka.services`, and the packages below. Entry:
`tidelog.broker.kafka.services.serve`.
"""
