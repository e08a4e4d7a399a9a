// @platformatic/kafka, in the steps that tests/e2e/test_other_clients.py asks for:
//
//   surface BOOTSTRAP TOPIC      everything it can do that is served
//
// Its idempotent producer numbers batches that are sent at the same time alike, which any broker takes for repetitions,
// and of what a producer has aborted its consumer leaves out the last transaction in an answer only.
import { Admin, Consumer, Producer, stringDeserializers, stringSerializers } from '@platformatic/kafka'
import { count, end, equal, refused, step, until } from './steps.mjs'

const [, , , bootstrap, topic] = process.argv
const base = { clientId: 'platformatic', bootstrapBrokers: bootstrap.split(','), retries: 100, retryDelay: 100 }
const TOPIC_RESOURCE = 2
const SET = 0

async function open (groupId, options = {}) {
  const consumer = new Consumer({ ...base, groupId, deserializers: stringDeserializers })
  const stream = await consumer.consume({
    autocommit: 50, topics: [topic], mode: 'committed', fallbackMode: 'earliest', sessionTimeout: 10_000, heartbeatInterval: 300, maxWaitTime: 200, ...options
  })
  return [consumer, stream]
}

/** Read as a group of one until so many records were read. */
async function read (groupId, wanted, options) {
  const [consumer, stream] = await open(groupId, options)
  const values = []
  let failure
  stream.on('error', error => { failure = error })
  stream.on('data', ({ value }) => values.push(value))
  await until(() => failure || values.length >= wanted)
  await consumer.close(true)
  if (failure) throw failure
  return values
}

async function membersComeAndGo (admin, producer) {
  const shared = `${topic}-shared`
  await admin.createTopics({ topics: [shared], partitions: 6, replicas: 1 })
  const read = new Set()
  const members = []
  for (let round = 0; round < 4; round++) { // three members come, one after the other; then the first one leaves
    if (round < 3) {
      const [member, stream] = await open(`${shared}-group`, { topics: [shared] })
      stream.on('data', ({ value }) => read.add(value))
      members.push(member)
    } else {
      await members[0].close(true)
    }
    await producer.send({ messages: count(60, each => ({ topic: shared, key: `${each}`, value: `${round}-${each}` })) })
    await until(() => read.size === 60 * (round + 1))
  }
  await Promise.all(members.slice(1).map(each => each.close(true)))
  await admin.deleteTopics({ topics: [shared] })
}

async function transactions (producer) {
  for (let each = 0; each < 6; each++) {
    const transaction = await producer.beginTransaction()
    await transaction.send({ messages: [{ topic, value: `transaction-${each}` }] })
    await (each % 3 === 2 ? transaction.abort() : transaction.commit())
  }
}

/** Copy records with their offsets, a transaction each. */
async function copy (producer, target, wanted) {
  const [consumer, stream] = await open(`${topic}-copiers`, { autocommit: false })
  let copied = 0
  for await (const message of stream) {
    const transaction = await producer.beginTransaction()
    await transaction.addConsumer(consumer)
    await transaction.send({ messages: [{ topic: target, value: message.value }] })
    await transaction.addOffset(message)
    await transaction.commit()
    if (++copied === wanted) break
  }
  await consumer.close(true)
}

async function surface () {
  const admin = new Admin(base)
  await step('create topic', async () => {
    const [found] = await admin.createTopics({ topics: [topic], partitions: 3, replicas: 1 })
    equal(found.partitions, 3)
    await refused(() => admin.createTopics({ topics: [topic], partitions: 3, replicas: 1 }), 'already exists')
    equal((await admin.listTopics()).includes(topic), true)
  })
  const producer = new Producer({ ...base, serializers: stringSerializers })
  for (const acks of [-1, 1, 0]) {
    for (const compression of ['none', 'gzip', 'snappy', 'lz4']) {
      const messages = count(10, each => ({ topic, key: `${each}`, value: `${acks}-${compression}-${each}`, headers: { h: 'v' } }))
      await step(`send with acks ${acks}, ${compression}`, () => producer.send({ acks, compression, messages }))
    }
  }
  const idempotent = new Producer({ ...base, serializers: stringSerializers, idempotent: true, acks: -1 })
  await step('send idempotently', async () => {
    for (let each = 0; each < 20; each++) {
      await idempotent.send({ messages: [{ topic, key: `${each}`, value: `idempotent-${each}` }] })
    }
  })
  const transactional = new Producer({ ...base, serializers: stringSerializers, idempotent: true, transactionalId: `${topic}-transactions` })
  await step('transactions', () => transactions(transactional))
  await step('read committed', () => read(`${topic}-group`, 144, { isolationLevel: 1 }).then(found => found.length))
  await step('read uncommitted', () => read(`${topic}-uncommitted`, 146, { isolationLevel: 0 }).then(found => found.length))
  await step('copy in transactions', async () => {
    await admin.createTopics({ topics: [`${topic}-copied`], partitions: 1, replicas: 1 })
    await copy(transactional, `${topic}-copied`, 10)
    const [found] = await admin.listConsumerGroupOffsets({ groups: [`${topic}-copiers`] })
    equal(found.topics[0].partitions.some(({ committedOffset }) => committedOffset > 0n), true)
  })
  await step('members come and go', () => membersComeAndGo(admin, producer))
  await step('groups', async () => {
    equal((await admin.listGroups()).get(`${topic}-group`).state, 'EMPTY')
    equal((await admin.describeGroups({ groups: [`${topic}-group`] })).get(`${topic}-group`).members.size, 0)
    const [found] = await admin.listConsumerGroupOffsets({ groups: [`${topic}-group`] })
    equal(found.topics[0].partitions.length > 0, true)
    await admin.alterConsumerGroupOffsets({ groupId: `${topic}-group`, topics: [{ name: topic, partitionOffsets: [{ partition: 0, offset: 5n }] }] })
    await admin.deleteConsumerGroupOffsets({ groupId: `${topic}-group`, topics: [{ name: topic, partitionIndexes: [0] }] })
    await admin.deleteGroups({ groups: [`${topic}-group`] })
  })
  await step('a static member is removed', async () => {
    const [consumer, stream] = await open(`${topic}-static`, { groupInstanceId: 'static' })
    stream.on('error', () => {}) // it is told that it is no member any more
    await admin.removeMembersFromConsumerGroup({ groupId: `${topic}-static` })
    await consumer.close(true)
  })
  await step('offsets', async () => {
    const asked = timestamp => admin.listOffsets({ topics: [{ name: topic, partitions: [{ partitionIndex: 0, timestamp }] }] })
    const [[first], [last]] = await Promise.all([asked(-2n), asked(-1n)])
    equal(first.partitions[0].offset, 0n)
    equal(last.partitions[0].offset > 10n, true)
  })
  await step('configs', async () => {
    const resource = { resourceType: TOPIC_RESOURCE, resourceName: topic }
    await admin.alterConfigs({ resources: [{ ...resource, configs: [{ name: 'retention.ms', value: '7777777' }] }] })
    await admin.incrementalAlterConfigs({ resources: [{ ...resource, configs: [{ name: 'retention.ms', configOperation: SET, value: '8888888' }] }] })
    const [found] = await admin.describeConfigs({ resources: [{ ...resource, configurationKeys: null }], includeDocumentation: true, includeSynonyms: true })
    equal(found.configs.find(({ name }) => name === 'retention.ms').value, '8888888')
  })
  await step('log dirs, partitions and records', async () => {
    const dirs = await admin.describeLogDirs({ topics: [{ name: topic, partitions: [0, 1] }] })
    await admin.createPartitions({ topics: [{ name: topic, count: 6, assignments: null }] })
    const [found] = await admin.deleteRecords({ topics: [{ name: topic, partitions: [{ partition: 0, offset: -1n }] }] })
    equal(found.partitions[0].lowWatermark > 10n, true)
    return dirs.length
  })
  await step('delete topics', () => admin.deleteTopics({ topics: [topic, `${topic}-copied`] }))
  await Promise.all([producer, idempotent, transactional, admin].map(each => each.close()))
}

await surface()
end()
