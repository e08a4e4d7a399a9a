// KafkaJS, in the steps that tests/e2e/test_other_clients.py asks for:
//
//   surface BOOTSTRAP TOPIC                       everything it can do
//   write BOOTSTRAP TOPIC PARTITIONS SECONDS      numbers to each partition by an idempotent producer
import kafkajs from 'kafkajs'
import { count, end, equal, refused, step, until, write } from './steps.mjs'

const { Kafka, CompressionTypes, ConfigResourceTypes, logLevel } = kafkajs
const [, , command, bootstrap, topic, ...more] = process.argv
const kafka = new Kafka({
  clientId: 'kafkajs',
  brokers: bootstrap.split(','),
  logLevel: logLevel.NOTHING,
  retry: { retries: 50, initialRetryTime: 50, maxRetryTime: 1000 }
})
const impatient = new Kafka({ clientId: 'impatient', brokers: bootstrap.split(','), logLevel: logLevel.NOTHING, retry: { retries: 0 } })

/** Read as a group of one until so many records were read; they are committed when it leaves. */
async function read (groupId, wanted, options = {}) {
  const consumer = kafka.consumer({ groupId, maxWaitTimeInMs: 200, ...options })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  const found = []
  await consumer.run({ eachMessage: async ({ message }) => { found.push(message) } })
  await until(() => found.length >= wanted)
  await consumer.stop()
  await consumer.disconnect()
  equal(found.length, wanted)
  return found
}

async function membersComeAndGo (admin, producer) {
  const shared = `${topic}-shared`
  await admin.createTopics({ topics: [{ topic: shared, numPartitions: 6 }], waitForLeaders: true })
  const read = new Set()
  const members = []
  for (let round = 0; round < 4; round++) { // three members come, one after the other; then the first one leaves
    if (round < 3) {
      const member = kafka.consumer({ groupId: `${shared}-group`, heartbeatInterval: 300, rebalanceTimeout: 10_000, maxWaitTimeInMs: 200 })
      await member.connect()
      await member.subscribe({ topic: shared, fromBeginning: true })
      await member.run({ eachMessage: async ({ message }) => { read.add(message.value.toString()) } })
      members.push(member)
    } else {
      await members[0].disconnect()
    }
    await producer.send({ topic: shared, messages: count(60, each => ({ value: `${round}-${each}` })) })
    await until(() => read.size === 60 * (round + 1))
  }
  const { groups: [group] } = await admin.describeGroups([`${shared}-group`])
  equal(group.members.length, 2)
  await Promise.all(members.slice(1).map(each => each.disconnect()))
  await admin.deleteTopics({ topics: [shared] })
}

async function transactions (producer) {
  for (let each = 0; each < 6; each++) {
    const transaction = await producer.transaction()
    await transaction.send({ topic, messages: [{ value: `transaction-${each}` }] })
    await transaction.sendOffsets({
      consumerGroupId: `${topic}-with-transactions`, topics: [{ topic, partitions: [{ partition: 0, offset: `${each}` }] }]
    })
    await (each % 3 === 2 ? transaction.abort() : transaction.commit())
  }
}

async function surface () {
  const admin = kafka.admin()
  await admin.connect()
  const mistaken = impatient.admin()
  await mistaken.connect()
  await step('create topic', async () => {
    equal(await admin.createTopics({ topics: [{ topic, numPartitions: 3 }], waitForLeaders: true }), true)
    equal(await admin.createTopics({ topics: [{ topic }] }), false)
  })
  const producer = kafka.producer()
  await producer.connect()
  for (const acks of [-1, 1, 0]) {
    for (const compression of [CompressionTypes.None, CompressionTypes.GZIP]) {
      const messages = count(10, each => ({ key: `${each}`, value: `${acks}-${compression}-${each}`, headers: { one: 'a', two: ['b', 'c'] } }))
      await step(`send with acks ${acks}, compression ${compression}`, () => producer.send({ topic, acks, compression, messages }))
    }
  }
  await step('send no value, an empty one, and one of long ago', () => producer.send({
    topic, messages: [{ key: 'k', value: null }, { key: null, value: '' }, { value: 'old', timestamp: '1000' }]
  }))
  const idempotent = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
  await idempotent.connect()
  await step('send idempotently', () => idempotent.send({ topic, messages: count(10, each => ({ value: `idempotent-${each}` })) }))
  const transactional = kafka.producer({ transactionalId: `${topic}-transactions`, idempotent: true, maxInFlightRequests: 1 })
  await transactional.connect()
  await step('transactions', () => transactions(transactional))
  await step('read as a group', async () => {
    const values = (await read(`${topic}-group`, 77)).map(({ value }) => value && value.toString())
    equal(values.includes('transaction-2'), false)
    equal(values.includes('transaction-4'), true)
  })
  await step('read uncommitted', () => read(`${topic}-uncommitted`, 79, { readUncommitted: true }).then(found => found.length))
  await step('offsets of the group', async () => {
    const total = ({ partitions }) => partitions.reduce((sum, { offset }) => sum + Number(offset), 0)
    const [found] = await admin.fetchOffsets({ groupId: `${topic}-group`, topics: [topic] })
    const ends = await admin.fetchTopicOffsets(topic)
    equal(total(found) <= total({ partitions: ends }) && total(found) >= 77, true)
  })
  await step('set and reset offsets', async () => {
    await admin.setOffsets({ groupId: `${topic}-group`, topic, partitions: [{ partition: 0, offset: '1' }] })
    await admin.resetOffsets({ groupId: `${topic}-group`, topic, earliest: true })
    const [found] = await admin.fetchOffsets({ groupId: `${topic}-group`, topics: [topic], resolveOffsets: true })
    equal(found.partitions.every(({ offset }) => offset === '0'), true)
  })
  await step('offsets by time', () => admin.fetchTopicOffsetsByTimestamp(topic, Date.now() + 3_600_000))
  await step('members come and go', () => membersComeAndGo(admin, producer))
  await step('describe and alter configs', async () => {
    const resource = { type: ConfigResourceTypes.TOPIC, name: topic }
    const configEntries = [{ name: 'retention.ms', value: '1234567' }]
    await admin.alterConfigs({ validateOnly: false, resources: [{ ...resource, configEntries }] })
    const { resources: [found] } = await admin.describeConfigs({ includeSynonyms: true, resources: [{ ...resource, configNames: ['retention.ms'] }] })
    equal(found.configEntries[0].configValue, '1234567')
  })
  await step('describe cluster, topic and groups', async () => {
    const { brokers } = await admin.describeCluster()
    const { topics: [found] } = await admin.fetchTopicMetadata({ topics: [topic] })
    const { groups: [group] } = await admin.describeGroups([`${topic}-group`])
    equal(found.partitions.length, 3)
    equal(group.state, 'Empty')
    const { groups } = await admin.listGroups()
    equal(groups.some(({ groupId }) => groupId === `${topic}-group`), true)
    return brokers.length
  })
  await step('create partitions', () => admin.createPartitions({ topicPartitions: [{ topic, count: 5 }] }))
  await step('reassign', async () => {
    const { brokers } = await admin.describeCluster()
    const partitionAssignment = [{ partition: 0, replicas: [brokers.at(-1).nodeId] }]
    await admin.alterPartitionReassignments({ topics: [{ topic, partitionAssignment }] })
    return admin.listPartitionReassignments({ topics: [{ topic, partitions: [0] }] })
  })
  await step('delete records', () => admin.deleteTopicRecords({ topic, partitions: [{ partition: 1, offset: '1' }] }))
  await step('delete groups', () => admin.deleteGroups([`${topic}-group`, `${topic}-uncommitted`]))
  await step('mistakes', async () => {
    const short = impatient.producer()
    await short.connect()
    await refused(() => short.send({ topic, messages: [{ value: 'x'.repeat(2 << 20) }] }), 'larger than the max message size')
    await short.disconnect()
    await refused(() => mistaken.deleteGroups(['nobody']), 'GROUP_ID_NOT_FOUND')
    await refused(() => mistaken.deleteTopics({ topics: ['nowhere'] }), 'does not host this topic-partition')
    const configEntries = [{ name: 'nonsense', value: 'x' }]
    await refused(() => mistaken.alterConfigs({ resources: [{ type: ConfigResourceTypes.TOPIC, name: topic, configEntries }] }), 'Configuration is invalid')
  })
  await step('delete topic', () => admin.deleteTopics({ topics: [topic] }))
  await Promise.all([producer, idempotent, transactional, admin, mistaken].map(each => each.disconnect()))
}

if (command === 'surface') {
  await surface()
} else {
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
  await producer.connect()
  await write(Number(more[0]), Number(more[1]), (partition, value) => producer.send({ topic, acks: -1, messages: [{ partition, value }] }))
  await producer.disconnect()
}
end()
