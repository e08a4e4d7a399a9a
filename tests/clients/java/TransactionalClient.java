import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Kafka's Java client with transactions, in the steps that tests/e2e/test_java_clients.py asks for.
 *
 * <pre>
 * write BOOTSTRAP ID TOPIC PARTITIONS COUNT      COUNT transactions; each third one is aborted
 * read BOOTSTRAP TOPIC PARTITIONS ISOLATION      "PARTITION VALUE" for each record up to the end
 * fence BOOTSTRAP ID TOPIC                       a second producer of the same transactional id takes over
 * copy BOOTSTRAP ID SOURCE TARGET GROUP WANTED   consume, transform, produce; each third transaction is aborted
 * </pre>
 */
public final class TransactionalClient {
    private static final Duration POLL = Duration.ofMillis(500);

    public static void main(String[] args) throws Exception {
        switch (args[0]) {
            case "write" -> write(args[1], args[2], args[3], Integer.parseInt(args[4]), Integer.parseInt(args[5]));
            case "read" -> read(args[1], args[2], Integer.parseInt(args[3]), args[4]);
            case "fence" -> fence(args[1], args[2], args[3]);
            case "copy" -> copy(args[1], args[2], args[3], args[4], args[5], Integer.parseInt(args[6]));
            default -> throw new IllegalArgumentException(args[0]);
        }
    }

    private static KafkaProducer<String, String> producer(String bootstrap, String id) {
        Properties config = new Properties();
        config.put("bootstrap.servers", bootstrap);
        config.put("transactional.id", id);
        KafkaProducer<String, String> made =
                new KafkaProducer<>(config, new StringSerializer(), new StringSerializer());
        made.initTransactions();
        return made;
    }

    private static KafkaConsumer<String, String> consumer(String bootstrap, String isolation, String group) {
        Properties config = new Properties();
        config.put("bootstrap.servers", bootstrap);
        config.put("isolation.level", isolation);
        config.put("auto.offset.reset", "earliest");
        config.put("enable.auto.commit", "false");
        config.put("session.timeout.ms", "6000");
        config.put("max.poll.records", "20");
        if (group != null) {
            config.put("group.id", group);
        }
        return new KafkaConsumer<>(config, new StringDeserializer(), new StringDeserializer());
    }

    private static void write(String bootstrap, String id, String topic, int partitions, int count) throws Exception {
        try (KafkaProducer<String, String> producer = producer(bootstrap, id);
                Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            tell(admin, id, "before");
            for (int number = 0; number < count; number++) {
                producer.beginTransaction();
                for (int partition = 0; partition < partitions; partition++) {
                    producer.send(new ProducerRecord<>(topic, partition, null, Integer.toString(number)));
                }
                if (number % 3 == 2) {
                    producer.flush();
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
            tell(admin, id, "after");
        }
    }

    private static void tell(Admin admin, String id, String when) throws Exception {
        TransactionDescription found = admin.describeTransactions(List.of(id)).description(id).get();
        System.out.println(when + " epoch " + found.producerEpoch() + " of " + found.producerId());
    }

    private static void read(String bootstrap, String topic, int partitions, String isolation) {
        try (KafkaConsumer<String, String> consumer = consumer(bootstrap, isolation, null)) {
            List<TopicPartition> all = new ArrayList<>();
            for (int partition = 0; partition < partitions; partition++) {
                all.add(new TopicPartition(topic, partition));
            }
            consumer.assign(all);
            consumer.seekToBeginning(all);
            Map<TopicPartition, Long> ends = consumer.endOffsets(all);
            while (all.stream().anyMatch(each -> consumer.position(each) < ends.get(each))) {
                for (ConsumerRecord<String, String> record : consumer.poll(POLL)) {
                    System.out.println(record.partition() + " " + record.value());
                }
            }
        }
    }

    private static void fence(String bootstrap, String id, String topic) {
        try (KafkaProducer<String, String> first = producer(bootstrap, id)) {
            first.beginTransaction();
            first.send(new ProducerRecord<>(topic, 0, null, "first"));
            first.flush();
            try (KafkaProducer<String, String> second = producer(bootstrap, id)) {
                second.beginTransaction();
                second.send(new ProducerRecord<>(topic, 0, null, "second"));
                try {
                    first.commitTransaction();
                } catch (KafkaException error) {
                    System.out.println("refused " + error.getClass().getSimpleName());
                }
                second.commitTransaction();
            }
        }
    }

    private static void copy(String bootstrap, String id, String source, String target, String group, int wanted)
            throws Exception {
        try (KafkaProducer<String, String> producer = producer(bootstrap, id);
                KafkaConsumer<String, String> consumer = consumer(bootstrap, "read_committed", group)) {
            consumer.subscribe(List.of(source));
            int copied = 0;
            for (int round = 1; copied < wanted; ) {
                ConsumerRecords<String, String> records = consumer.poll(POLL);
                if (records.isEmpty()) {
                    continue;
                }
                producer.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
                for (ConsumerRecord<String, String> record : records) {
                    producer.send(new ProducerRecord<>(target, record.partition(), null, record.value()));
                    offsets.put(
                            new TopicPartition(record.topic(), record.partition()),
                            new OffsetAndMetadata(record.offset() + 1));
                }
                producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
                if (round++ % 3 == 0) {
                    producer.abortTransaction();
                    consumer.committed(consumer.assignment()).forEach((partition, from) ->
                            consumer.seek(partition, from == null ? 0 : from.offset()));
                } else {
                    producer.commitTransaction();
                    copied += records.count();
                    System.out.println("copied " + copied);
                }
            }
        }
    }
}
