"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs.

Resources: topics (2), brokers (4), a broker's loggers (8, `tidelog.broker.kafka.loggers`), client metrics (16) and
groups (32, both `tidelog.broker.kafka.named_configs`). A broker answers for itself only; a broker resource with an
empty name is the cluster-wide layer. Topic configs are checked as a whole after the change, so that contradictory
values cannot be set one after the other. The broker keys that may change are the topic defaults, the rates of throttles
(which have no effect, and the answer says so), and, in the cluster-wide layer only, the dynamic settings of the
controllers (`tidelog.controller.model.overrides`); all others are set in the configuration file. To delete a known
config that is not set is no error.

What a change leads to is computed here, from this broker's metadata, which may be old. So these first catch up with
what has been acknowledged, and the command names the configs that it is based on: if another change came first, it is
refused, and computed anew (`tidelog.controller.model.configs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from tidelog.broker.kafka import broker_config, loggers, named_configs
from tidelog.broker.kafka.broker_config import ConfigEntry
from tidelog.broker.kafka.handlers.admin_errors import INVALID_REQUEST, NONE, ItemOutcome, each, outcome
from tidelog.broker.kafka.handlers.metadata import is_legal_name
from tidelog.broker.kafka.loggers import BROKER_LOGGER
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.configs import (
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
    IncrementalAlterConfigsResponse,
)
from tidelog.broker.partitions import topic_config
from tidelog.broker.partitions.topic_config import ConfigType, Layers, TopicConfig
from tidelog.controller.client.configs import until_based
from tidelog.controller.model import overrides
from tidelog.controller.model.configs import digest
from tidelog.controller.model.errors import InvalidTopic
from tidelog.runtime.errors import ConfigError, InvalidInput, NotFound

if TYPE_CHECKING:
    from tidelog.controller.model.records import TopicRecord

TOPIC = 2
BROKER = 4

SET, DELETE, APPEND, SUBTRACT = range(4)

THROTTLES = frozenset({
    *broker_config.THROTTLES, "leader.replication.throttled.replicas", "follower.replication.throttled.replicas"
})  # fmt: skip
"""Configs of topics and brokers by which kafka-reassign-partitions throttles moves."""

Changes = dict[str, str | None]
"""New value by name; None removes the override."""
R = TypeVar("R", AlterConfigsResource, IncrementalAlterConfigsResource)
ChangesOf = Callable[[R, Mapping[str, str]], Changes]
"""Computes the changes of a resource in a request from its current overrides."""


def topic_layers(services: Services) -> Layers:
    """Return this broker's current layers below a topic's overrides."""
    return broker_config.layers(services)


def topic_entries(services: Services, record: TopicRecord) -> list[ConfigEntry]:
    """Return every config of a topic with all its layers, ordered by name."""
    layers = topic_layers(services)
    entries = []
    for row in topic_config.TOPIC_CONFIGS.values():
        synonyms = tuple(topic_config.resolve(row, record.configs, layers))
        first = synonyms[0]
        entries.append(ConfigEntry(row.name, row.type, first.value, first.source, False, False, row.doc, synonyms))
    return entries


async def describe_configs(context: RequestContext, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    """DescribeConfigs v1–4. A resource that is asked for several times is described once: it may be long."""
    synonyms, documentation = request.include_synonyms, request.include_documentation

    async def describe(resource: DescribeConfigsResource) -> DescribeConfigsResult:
        found = await outcome(_entries(context.services, resource))
        keys = resource.configuration_keys
        wanted = set(keys) if keys else None  # as in Kafka, null and empty both mean all
        entries = [entry for entry in found.value or [] if wanted is None or entry.name in wanted]
        return DescribeConfigsResult(
            error_code=found.code,
            error_message=found.message,
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            configs=[_describe_entry(entry, synonyms, documentation) for entry in entries],
        )

    results = await each(dict.fromkeys(request.resources), describe)
    return DescribeConfigsResponse(results=results)


async def _entries(services: Services, resource: DescribeConfigsResource) -> list[ConfigEntry]:
    if resource.resource_type == TOPIC:
        if not is_legal_name(resource.resource_name):
            raise InvalidTopic(f"no topic can have the name {resource.resource_name!r}")
        return topic_entries(services, _topic(services, resource.resource_name))
    if resource.resource_type == BROKER:
        if resource.resource_name == "":
            return broker_config.cluster_entries(services)
        _require_me(services, resource.resource_name, "describes")
        return broker_config.broker_entries(services)
    if resource.resource_type == BROKER_LOGGER:
        _require_me(services, resource.resource_name, "describes")
        return loggers.entries()
    if resource.resource_type in named_configs.KINDS:
        return named_configs.entries(services.controller.image, resource.resource_type, resource.resource_name)
    raise _no_configs(resource.resource_type)


def _require_me(services: Services, name: str, verb: str) -> None:
    if name != str(services.node_id):
        raise InvalidInput(
            f"unexpected broker id {name!r}: this is broker {services.node_id}",
            hint=f"a broker {verb} only itself; connect to that broker",
        )


def _no_configs(resource_type: int) -> InvalidInput:
    message = f"resource type {resource_type} has no configs here"
    known = f"{TOPIC} is topic, {BROKER} is broker, {BROKER_LOGGER} is a broker's loggers"
    return InvalidInput(
        message, hint=f"{known}, {named_configs.CLIENT_METRICS} client metrics, {named_configs.GROUP} group"
    )


def _topic(services: Services, name: str) -> TopicRecord:
    record = services.controller.image.topic(name)
    if record is None:
        raise NotFound(f"topic {name!r} does not exist")
    return record


def _describe_entry(entry: ConfigEntry, synonyms: bool, documentation: bool) -> DescribeConfigsResourceResult:
    listed = entry.synonyms if synonyms else ()
    return DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.read_only,
        config_source=int(entry.source),
        is_sensitive=entry.sensitive,
        synonyms=[DescribeConfigsSynonym(name=one.name, value=one.value, source=int(one.source)) for one in listed],
        config_type=int(entry.type),
        documentation=entry.doc if documentation else None,
    )


async def alter_configs(context: RequestContext, request: AlterConfigsRequest) -> AlterConfigsResponse:
    """AlterConfigs v0–2: the given configs replace all overrides of the resource."""

    def changes(resource: AlterConfigsResource, current: Mapping[str, str]) -> Changes:
        _refuse_nulls(resource.configs)
        given: Changes = {config.name: config.value for config in resource.configs}
        return {**dict.fromkeys(current), **given}

    responses = await _alter(context.services, request.resources, changes, request.validate_only)
    return AlterConfigsResponse(responses=responses)


async def incremental_alter_configs(
    context: RequestContext, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    """IncrementalAlterConfigs v0–1: SET, DELETE, APPEND and SUBTRACT single configs (KIP-339)."""
    services = context.services

    def changes(resource: IncrementalAlterConfigsResource, current: Mapping[str, str]) -> Changes:
        _refuse_nulls(config for config in resource.configs if config.config_operation != DELETE)
        result: Changes = {}
        for config in resource.configs:
            result[config.name] = _apply(services, resource.resource_type, config, current)
        return result

    responses = await _alter(services, request.resources, changes, request.validate_only)
    return IncrementalAlterConfigsResponse(responses=responses)


def _refuse_nulls(configs: Iterable[AlterableConfig | IncrementalAlterableConfig]) -> None:
    nulls = sorted(config.name for config in configs if config.value is None)
    if nulls:
        raise InvalidInput(f"null value not supported for: {', '.join(nulls)}")


def _apply(
    services: Services, resource_type: int, config: IncrementalAlterableConfig, current: Mapping[str, str]
) -> str | None:
    operation = config.config_operation
    if operation == DELETE:
        return None
    if operation == SET:
        return str(config.value)
    if operation not in (APPEND, SUBTRACT):
        raise InvalidInput(f"unknown operation {operation} for {config.name}")
    if resource_type == BROKER_LOGGER or (resource_type == BROKER and config.name in overrides.DYNAMIC):
        raise ConfigError(f"{config.name} is not a list: set it")
    rows, what = _rows_of(resource_type)
    row = rows.get(config.name)
    if row is None:
        raise topic_config.unknown_key(config.name, rows, what)
    if row.type is not ConfigType.LIST:
        verb = "append to" if operation == APPEND else "subtract from"
        raise ConfigError(f"cannot {verb} {config.name}: it is not a list")
    layers = topic_layers(services) if resource_type in (TOPIC, BROKER) else Layers()
    inherited = topic_config.resolve(row, {}, layers)[0].value
    elements = topic_config.split_list(current.get(config.name, inherited))
    given = topic_config.split_list(config.value or "")
    if operation == APPEND:
        present = set(elements)
        elements += [element for element in given if element not in present]
    else:
        gone = set(given)
        elements = [element for element in elements if element not in gone]
    return ",".join(elements)


def _rows_of(resource_type: int) -> tuple[Mapping[str, TopicConfig], str]:
    """Return the configs of a type of resource that may change, and what messages call them."""
    if resource_type == TOPIC:
        return topic_config.TOPIC_CONFIGS, "topic config"
    if resource_type == BROKER:
        return broker_config.CHANGEABLE, "broker config"
    if resource_type in named_configs.KINDS:
        about = named_configs.KINDS[resource_type]
        return about.rows, f"config of a {about.what}"
    raise _no_configs(resource_type)


async def _alter(
    services: Services, resources: Sequence[R], changes: ChangesOf[R], validate_only: bool
) -> list[AlterConfigsResourceResponse]:
    counts = Counter((resource.resource_type, resource.resource_name) for resource in resources)
    caught_up: ItemOutcome[None] = ItemOutcome(NONE, None, None)

    async def alter(resource: R) -> AlterConfigsResourceResponse:
        done: ItemOutcome[str | None]
        if counts[(resource.resource_type, resource.resource_name)] > 1:
            done = ItemOutcome(INVALID_REQUEST, "each resource must appear at most once", None)
        elif caught_up.code and resource.resource_type != BROKER_LOGGER:
            done = ItemOutcome(caught_up.code, caught_up.message, None)
        else:
            done = await outcome(_alter_one(services, resource, changes, validate_only))
        return AlterConfigsResourceResponse(
            error_code=done.code,
            error_message=done.message or done.value,
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
        )

    unique = {(resource.resource_type, resource.resource_name): resource for resource in resources}
    if any(resource.resource_type != BROKER_LOGGER for resource in resources):
        caught_up = await outcome(services.controller.catch_up())
    return await each(unique.values(), alter)


async def _alter_one(services: Services, resource: R, changes: ChangesOf[R], validate_only: bool) -> str | None:
    """Make the changes of one resource; return what its user should know."""
    names = Counter(config.name for config in resource.configs)
    twice = sorted(name for name, times in names.items() if times > 1)
    if twice:
        raise InvalidInput(f"configs given twice: {', '.join(twice)}")
    alter = _alter_named if resource.resource_type in named_configs.KINDS else _OVERRIDES.get(resource.resource_type)
    if alter is not None:
        await until_based(lambda: alter(services, resource, changes, validate_only))
    elif resource.resource_type == BROKER_LOGGER and isinstance(resource, IncrementalAlterConfigsResource):
        _require_me(services, resource.resource_name, "changes")
        loggers.change(changes(resource, {}), validate_only=validate_only)
    else:
        raise _no_configs(resource.resource_type)
    return _without_effect(resource)


def _without_effect(resource: AlterConfigsResource | IncrementalAlterConfigsResource) -> str | None:
    """Tell of throttles that are set: kafka-reassign-partitions sets them, and a move copies nothing."""
    idle = sorted(each.name for each in resource.configs if each.name in THROTTLES and each.value)
    return f"a move copies nothing here, so throttles have no effect: {', '.join(idle)}" if idle else None


async def _alter_named(services: Services, resource: R, changes: ChangesOf[R], validate_only: bool) -> None:
    kind, name, image = resource.resource_type, resource.resource_name, services.controller.image
    current = named_configs.overrides_of(image, kind, name)
    final = named_configs.check(image, kind, name, changes(resource, current))
    effective = {key: value for key, value in final.items() if current.get(key) != value}
    if effective and not validate_only:
        await services.controller.alter_configs(named_configs.KINDS[kind].kind, name, effective, base=digest(current))


async def _alter_topic(services: Services, resource: R, changes: ChangesOf[R], validate_only: bool) -> None:
    name = resource.resource_name
    if not name:
        raise InvalidInput("configs of topics need the name of one")
    if not is_legal_name(name):
        raise InvalidTopic(f"no topic can have the name {name!r}")
    record = _topic(services, name)
    asked = changes(resource, record.configs)
    _refuse_unknown(asked, topic_config.TOPIC_CONFIGS, record.configs, "topic config")
    wanted = {**record.configs, **asked}
    known = {n: v for n, v in wanted.items() if v is not None and n in topic_config.TOPIC_CONFIGS}
    checked = topic_config.validate(known)
    final: Changes = {name: None if value is None else checked[name] for name, value in asked.items()}
    effective = {name: value for name, value in final.items() if record.configs.get(name) != value}
    if effective and not validate_only:
        await services.controller.alter_topic_configs(record.id, effective, base=digest(record.configs))


async def _alter_broker(services: Services, resource: R, changes: ChangesOf[R], validate_only: bool) -> None:
    name = resource.resource_name
    if name not in ("", str(services.node_id)):
        raise InvalidInput(
            f"unexpected broker id {name!r}: this is broker {services.node_id}",
            hint="a broker changes its own configs, or the cluster's with an empty name",
        )
    kind = "broker" if name else "cluster"
    current = services.controller.image.configs.get((kind, name), {})
    asked = changes(resource, current)
    final = _of_controllers(services, kind, {key: value for key, value in asked.items() if overrides.is_known(key)})
    asked = {key: value for key, value in asked.items() if not overrides.is_known(key)}
    known = broker_config.CHANGEABLE
    of_file = _static_keys(services) - known.keys()
    asked = {key: value for key, value in asked.items() if key not in of_file or value is not None or key in current}
    static = sorted(key for key, value in asked.items() if key in of_file and value is not None)
    if static:
        raise InvalidInput(
            f"cannot update these configs dynamically: {', '.join(static)}",
            hint="set them in the configuration file and restart the broker",
        )
    _refuse_unknown(asked, known, current, "broker config")
    for key, value in asked.items():
        if value is not None:
            topic_config.parse(known[key], value, key)
    final |= {key: None if value is None else value.strip() for key, value in asked.items()}
    effective = {key: value for key, value in final.items() if current.get(key) != value}
    if effective and not validate_only:
        await services.controller.alter_configs(kind, name, effective, base=digest(current))


_OVERRIDES = {TOPIC: _alter_topic, BROKER: _alter_broker}


def _of_controllers(services: Services, kind: str, asked: Changes) -> Changes:
    """Check changes of settings of the controllers, and return them as they are stored."""
    image, configs = services.controller.image, services.broker_configs()
    final: Changes = {}
    for key, value in asked.items():
        if kind != "cluster" and key in overrides.DYNAMIC:
            raise InvalidInput(
                f"{key} is a setting of the controllers, which counts for all brokers",
                hint="change the cluster's: a broker resource with an empty name (kafka-configs --entity-default)",
            )
        final |= overrides.change_of(key, value, image.cluster_configs, level=image.level, configs=configs)
    return final


def _static_keys(services: Services) -> set[str]:
    return {entry.name for entry in broker_config.broker_entries(services)}


def _refuse_unknown(asked: Changes, known: Mapping[str, object], current: Mapping[str, str], what: str) -> None:
    """Refuse unknown names; unknown overrides stored by another version of Tidelog may still be removed."""
    for name, value in asked.items():
        if name not in known and not (value is None and name in current):
            raise topic_config.unknown_key(name, known, what)


APIS = [
    serve(DescribeConfigsRequest, 1, 4, describe_configs),
    serve(AlterConfigsRequest, 0, 2, alter_configs),
    serve(IncrementalAlterConfigsRequest, 0, 1, incremental_alter_configs),
]
