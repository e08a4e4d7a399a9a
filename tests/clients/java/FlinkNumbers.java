import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.Optional;
import java.util.stream.Stream;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiterStrategy;
import org.apache.flink.configuration.CheckpointingOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.ExternalizedCheckpointRetention;
import org.apache.flink.configuration.StateRecoveryOptions;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.sink.TransactionNamingStrategy;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * A Flink job in this process: numbers, at a rate, to a topic by the Kafka sink with exactly-once delivery.
 *
 * <pre>FlinkNumbers BOOTSTRAP TOPIC CHECKPOINTS {INCREMENTING|POOLING} COUNT PER_SECOND</pre>
 *
 * It checkpoints every second, and goes on at the newest checkpoint in the directory CHECKPOINTS if one is there. The
 * transactions that were prepared with that checkpoint are then committed, and those begun since aborted.
 */
public final class FlinkNumbers {
    public static void main(String[] args) throws Exception {
        Path checkpoints = Path.of(args[2]);
        Configuration config = new Configuration();
        config.set(CheckpointingOptions.CHECKPOINT_STORAGE, "filesystem");
        config.set(CheckpointingOptions.CHECKPOINTS_DIRECTORY, checkpoints.toUri().toString());
        config.set(
                CheckpointingOptions.EXTERNALIZED_CHECKPOINT_RETENTION,
                ExternalizedCheckpointRetention.RETAIN_ON_CANCELLATION);
        newest(checkpoints).ifPresent(found -> {
            System.out.println("goes on at " + found.getFileName());
            config.set(StateRecoveryOptions.SAVEPOINT_PATH, found.toUri().toString());
        });
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.createLocalEnvironment(2, config);
        environment.enableCheckpointing(1000);

        GeneratorFunction<Long, String> text = number -> Long.toString(number);
        DataGeneratorSource<String> source = new DataGeneratorSource<>(
                text,
                Long.parseLong(args[4]),
                RateLimiterStrategy.perSecond(Double.parseDouble(args[5])),
                Types.STRING);
        KafkaSink<String> sink = KafkaSink.<String>builder()
                .setBootstrapServers(args[0])
                .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
                .setTransactionalIdPrefix("flink-" + args[1])
                .setTransactionNamingStrategy(TransactionNamingStrategy.valueOf(args[3]))
                .setProperty("transaction.timeout.ms", "60000")
                .setRecordSerializer(KafkaRecordSerializationSchema.<String>builder()
                        .setTopic(args[1])
                        .setValueSerializationSchema(new SimpleStringSchema())
                        .build())
                .build();
        environment.fromSource(source, WatermarkStrategy.noWatermarks(), "numbers").uid("numbers").sinkTo(sink).uid("sink");
        environment.execute();
        System.out.println("done");
    }

    /** The newest complete checkpoint of any earlier run. */
    private static Optional<Path> newest(Path directory) throws IOException {
        if (!Files.exists(directory)) {
            return Optional.empty();
        }
        try (Stream<Path> all = Files.walk(directory)) {
            return all.filter(each -> each.getFileName().toString().equals("_metadata"))
                    .max(Comparator.comparing(each -> each.toFile().lastModified()))
                    .map(Path::getParent);
        }
    }
}
