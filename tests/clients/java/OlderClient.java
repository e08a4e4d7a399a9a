import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Kafka's Java client of any version from 2.1 on, which speaks that version's protocol: OlderClient BOOTSTRAP TOPIC. A line
 * for each step; it ends with 1 if one has failed (tests/e2e/test_other_clients.py).
 */
@SuppressWarnings("deprecation")
public final class OlderClient {
    private static final int AT_A_TIME = 20;
    private static final long DEADLINE_MS = 30_000;

    private final String bootstrap;
    private final String topic;
    private int failed;
    /** Records that consumers of committed ones see. */
    private int written;

    private OlderClient(String bootstrap, String topic) {
        this.bootstrap = bootstrap;
        this.topic = topic;
    }

    public static void main(String[] arguments) {
        OlderClient client = new OlderClient(arguments[0], arguments[1]);
        client.walk();
        System.exit(client.failed > 0 ? 1 : 0);
    }

    private void step(String name, Callable<?> run) {
        try {
            System.out.println("ok " + name + ": " + run.call());
        } catch (Exception error) {
            failed++;
            System.out.println("failed " + name + ": " + error);
        }
    }

    private static void equal(Object found, Object wanted) {
        if (!found.equals(wanted)) {
            throw new IllegalStateException(found + ", and not " + wanted);
        }
    }

    private Properties settings(String... more) {
        Properties found = new Properties();
        found.put("bootstrap.servers", bootstrap);
        for (int at = 0; at < more.length; at += 2) {
            found.put(more[at], more[at + 1]);
        }
        return found;
    }

    private KafkaProducer<String, String> producer(String... more) {
        return new KafkaProducer<>(settings(more), new StringSerializer(), new StringSerializer());
    }

    private KafkaConsumer<String, String> consumer(String group, String... more) {
        Properties found = settings(more);
        found.put("group.id", group);
        found.put("auto.offset.reset", "earliest");
        found.put("heartbeat.interval.ms", "300");
        found.put("session.timeout.ms", "10000");
        return new KafkaConsumer<>(found, new StringDeserializer(), new StringDeserializer());
    }

    private int send(String codec, String acks) throws Exception {
        try (KafkaProducer<String, String> producer =
                producer("acks", acks, "compression.type", codec, "enable.idempotence", "false")) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int each = 0; each < AT_A_TIME; each++) {
                sent.add(producer.send(new ProducerRecord<>(topic, "" + each, codec + acks + each)));
            }
            for (Future<RecordMetadata> each : sent) {
                each.get();
            }
        }
        written += AT_A_TIME;
        return AT_A_TIME;
    }

    private Object transactions() throws Exception {
        try (KafkaProducer<String, String> producer = producer("transactional.id", topic + "-transactions")) {
            producer.initTransactions();
            for (int each = 0; each < 6; each++) {
                producer.beginTransaction();
                producer.send(new ProducerRecord<>(topic, "k", "transaction-" + each)).get();
                TopicPartition first = new TopicPartition(topic, 0);
                producer.sendOffsetsToTransaction(Map.of(first, new OffsetAndMetadata(each)), topic + "-with-transactions");
                if (each % 3 == 2) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                    written++;
                }
            }
        }
        return null;
    }

    private int read(int wanted, String group, String... more) {
        Set<String> found = ConcurrentHashMap.newKeySet();
        try (KafkaConsumer<String, String> consumer = consumer(group, more)) {
            consumer.subscribe(List.of(topic));
            long end = System.currentTimeMillis() + DEADLINE_MS;
            while (found.size() < wanted && System.currentTimeMillis() < end) {
                for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofMillis(100))) {
                    found.add(each.value());
                }
            }
            consumer.commitSync();
        }
        equal(found.size(), wanted);
        return found.size();
    }

    /** Three members come, one after the other; then the first one leaves. */
    private Object membersComeAndGo(String shared) throws Exception {
        Set<String> found = ConcurrentHashMap.newKeySet();
        List<Thread> members = new ArrayList<>();
        boolean[] stopped = new boolean[3];
        try (KafkaProducer<String, String> producer = producer()) {
            for (int round = 0; round < 4; round++) {
                int own = round;
                if (round < 3) {
                    members.add(new Thread(() -> {
                        try (KafkaConsumer<String, String> consumer = consumer(shared + "-group")) {
                            consumer.subscribe(List.of(shared));
                            while (!stopped[own]) {
                                consumer.poll(Duration.ofMillis(50)).forEach(each -> found.add(each.value()));
                            }
                        }
                    }));
                    members.get(round).start();
                } else {
                    stopped[0] = true;
                    members.get(0).join();
                }
                for (int each = 0; each < 60; each++) {
                    producer.send(new ProducerRecord<>(shared, round + "-" + each)).get();
                }
                long end = System.currentTimeMillis() + DEADLINE_MS;
                while (found.size() < 60 * (round + 1) && System.currentTimeMillis() < end) {
                    Thread.sleep(10);
                }
            }
        } finally {
            Arrays.fill(stopped, true);
            for (Thread each : members) {
                each.join();
            }
        }
        equal(found.size(), 240);
        return found.size();
    }

    private Object offsets() {
        try (KafkaConsumer<String, String> consumer = consumer(topic + "-none")) {
            TopicPartition first = new TopicPartition(topic, 0);
            List<TopicPartition> asked = List.of(first);
            consumer.assign(asked);
            equal(consumer.beginningOffsets(asked).get(first), 0L);
            equal(consumer.offsetsForTimes(Map.of(first, 1L)).get(first).offset(), 0L);
            consumer.seekToEnd(asked);
            equal(consumer.position(first), consumer.endOffsets(asked).get(first));
            return consumer.position(first);
        }
    }

    private void administer(AdminClient admin) {
        List<Integer> brokers = new ArrayList<>();
        step("describe cluster", () -> {
            for (Node each : admin.describeCluster().nodes().get()) {
                brokers.add(each.id());
            }
            return admin.describeCluster().controller().get();
        });
        step("describe topic", () -> {
            equal(admin.describeTopics(List.of(topic)).all().get().get(topic).partitions().size(), 3);
            return null;
        });
        step("describe configs", () -> {
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
            return admin.describeConfigs(List.of(resource)).all().get().get(resource).get("retention.ms").value();
        });
        step("create partitions", () -> admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(4))).all().get());
        step("log dirs", () -> admin.describeLogDirs(brokers).all().get().size());
        step("delete records", () ->
                admin.deleteRecords(Map.of(new TopicPartition(topic, 0), RecordsToDelete.beforeOffset(1))).all().get());
        step("groups", () -> {
            String group = topic + "-group";
            equal(admin.describeConsumerGroups(List.of(group)).all().get().get(group).members().size(), 0);
            equal(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().size(), 3);
            admin.deleteConsumerGroups(List.of(group)).all().get();
            return admin.listConsumerGroups().all().get().size();
        });
    }

    private void walk() {
        String shared = topic + "-shared";
        try (AdminClient admin = AdminClient.create(settings())) {
            step("create topics", () -> admin.createTopics(
                    List.of(new NewTopic(topic, 3, (short) 1), new NewTopic(shared, 6, (short) 1))).all().get());
            for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
                for (String acks : List.of("all", "1", "0")) {
                    step("send " + codec + " with acks " + acks, () -> send(codec, acks));
                }
            }
            step("transactions", this::transactions);
            step("read as a group", () -> read(written, topic + "-group", "isolation.level", "read_committed"));
            step("read uncommitted, sticky", () -> read(written + 2, topic + "-sticky",
                    "partition.assignment.strategy", "org.apache.kafka.clients.consumer.StickyAssignor"));
            step("members come and go", () -> membersComeAndGo(shared));
            step("offsets", this::offsets);
            administer(admin);
            step("delete topics", () -> admin.deleteTopics(List.of(topic, shared)).all().get());
        }
    }
}
