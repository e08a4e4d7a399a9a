// Sarama, in the steps that tests/e2e/test_other_clients.py asks for:
//
//	surface BOOTSTRAP TOPIC VERSION               everything it can do, as a client of this version of Kafka
//	write BOOTSTRAP TOPIC PARTITIONS SECONDS      numbers to each partition by an idempotent producer
package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/IBM/sarama"
	"tidelog.test/clients/steps"
)

const (
	deadline = 30 * time.Second
	atATime  = 20
)

// surface is one walk over what the client can do with one topic.
type surface struct {
	servers []string
	topic   string
	config  *sarama.Config
	admin   sarama.ClusterAdmin
	written int // records that consumers of committed ones see
	aborted int
}

func configured(version sarama.KafkaVersion) *sarama.Config {
	config := sarama.NewConfig()
	config.Version = version
	config.Producer.Return.Successes = true
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Interval = 100 * time.Millisecond
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	return config
}

// with is a copy of the configuration with a change.
func (s *surface) with(change func(*sarama.Config)) *sarama.Config {
	config := *s.config
	change(&config)
	return &config
}

func idempotent(config *sarama.Config) {
	config.Producer.Idempotent = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Net.MaxOpenRequests = 1
}

func (s *surface) send(config *sarama.Config, name string, count int) (any, error) {
	producer, err := sarama.NewSyncProducer(s.servers, config)
	if err != nil {
		return nil, err
	}
	defer producer.Close()
	var messages []*sarama.ProducerMessage
	for each := 0; each < count; each++ {
		messages = append(messages, &sarama.ProducerMessage{
			Topic:   s.topic,
			Key:     sarama.StringEncoder(fmt.Sprint(each)),
			Value:   sarama.StringEncoder(fmt.Sprint(name, "-", each)),
			Headers: []sarama.RecordHeader{{Key: []byte("h"), Value: []byte("v")}},
		})
	}
	s.written += count
	return count, producer.SendMessages(messages)
}

func (s *surface) transactions() (any, error) {
	producer, err := sarama.NewSyncProducer(s.servers, s.with(func(config *sarama.Config) {
		idempotent(config)
		config.Producer.Transaction.ID = s.topic + "-transactions"
	}))
	if err != nil {
		return nil, err
	}
	defer producer.Close()
	for each := 0; each < 6; each++ {
		if err := producer.BeginTxn(); err != nil {
			return nil, err
		}
		value := sarama.StringEncoder(fmt.Sprint("transaction-", each))
		if _, _, err := producer.SendMessage(&sarama.ProducerMessage{Topic: s.topic, Value: value}); err != nil {
			return nil, err
		}
		offsets := map[string][]*sarama.PartitionOffsetMetadata{s.topic: {{Partition: 0, Offset: int64(each)}}}
		if err := producer.AddOffsetsToTxn(offsets, s.topic+"-with-transactions"); err != nil {
			return nil, err
		}
		end := producer.CommitTxn
		if each%3 == 2 {
			end = producer.AbortTxn
			s.aborted++
		} else {
			s.written++
		}
		if err := end(); err != nil {
			return nil, err
		}
	}
	return producer.TxnStatus(), nil
}

// reader collects what the members of a group have read.
type reader struct {
	mutex  sync.Mutex
	values map[string]int
}

func (*reader) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*reader) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (r *reader) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		session.MarkMessage(message, "")
		r.mutex.Lock()
		r.values[string(message.Value)]++
		r.mutex.Unlock()
	}
	return nil
}

func (r *reader) distinct() int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return len(r.values)
}

func (r *reader) waitFor(ctx context.Context, count int) error {
	for r.distinct() < count && ctx.Err() == nil {
		time.Sleep(5 * time.Millisecond)
	}
	return steps.Equal(r.distinct(), count)
}

// member consumes until it is stopped.
func (s *surface) member(ctx context.Context, config *sarama.Config, group, topic string, into *reader) error {
	consumer, err := sarama.NewConsumerGroup(s.servers, group, config)
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		if err := consumer.Consume(ctx, []string{topic}, into); err != nil && ctx.Err() == nil {
			return errors.Join(err, consumer.Close())
		}
	}
	return consumer.Close()
}

// read consumes as a group of one until it has read `count` different values.
func (s *surface) read(config *sarama.Config, group string, count int) (any, error) {
	ctx, stop := context.WithTimeout(context.Background(), deadline)
	defer stop()
	into, ended := &reader{values: map[string]int{}}, make(chan error, 1)
	go func() { ended <- s.member(ctx, config, group, s.topic, into) }()
	err := into.waitFor(ctx, count)
	stop()
	return count, errors.Join(err, <-ended)
}

func (s *surface) rebalance() (any, error) {
	topic := s.topic + "-shared"
	if err := s.admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 6, ReplicationFactor: 1}, false); err != nil {
		return nil, err
	}
	producer, err := sarama.NewSyncProducer(s.servers, s.config)
	if err != nil {
		return nil, err
	}
	defer producer.Close()
	ctx, stopAll := context.WithTimeout(context.Background(), 2*deadline)
	defer stopAll()
	into, ended := &reader{values: map[string]int{}}, make(chan error, 3)
	var stopFirst context.CancelFunc
	total := 0
	for round := 0; round < 4; round++ { // three members come, one after the other; then the first one leaves
		if round < 3 {
			member, stop := context.WithCancel(ctx)
			defer stop()
			if round == 0 {
				stopFirst = stop
			}
			go func() { ended <- s.member(member, s.config, topic+"-group", topic, into) }()
		} else {
			stopFirst()
		}
		for each := 0; each < 60; each++ {
			value := sarama.StringEncoder(fmt.Sprint(round, "-", each))
			if _, _, err := producer.SendMessage(&sarama.ProducerMessage{Topic: topic, Value: value}); err != nil {
				return nil, err
			}
		}
		total += 60
		if err := into.waitFor(ctx, total); err != nil {
			return nil, err
		}
	}
	stopAll()
	return total, errors.Join(<-ended, <-ended, <-ended)
}

// clusterSteps asks the cluster about itself and the topic, and changes the topic.
func (s *surface) clusterSteps() {
	brokers := []int32{}
	steps.Step("describe cluster", func() (any, error) {
		found, _, err := s.admin.DescribeCluster()
		for _, each := range found {
			brokers = append(brokers, each.ID())
		}
		return len(found), err
	})
	steps.Step("describe topics", func() (any, error) {
		found, err := s.admin.DescribeTopics([]string{s.topic})
		if err != nil {
			return nil, err
		}
		return nil, steps.Equal(len(found[0].Partitions), 3)
	})
	steps.Step("describe and alter config", func() (any, error) {
		value := "1234567"
		if err := s.admin.AlterConfig(sarama.TopicResource, s.topic, map[string]*string{"retention.ms": &value}, false); err != nil {
			return nil, err
		}
		found, err := s.admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: s.topic})
		for _, each := range found {
			if each.Name == "retention.ms" {
				return len(found), steps.Equal(each.Value, value)
			}
		}
		return nil, errors.Join(err, errors.New("no retention.ms"))
	})
	if s.config.Version.IsAtLeast(sarama.V2_4_0_0) {
		steps.Step("incremental alter config", func() (any, error) {
			value := "2345678"
			change := sarama.IncrementalAlterConfigsEntry{Operation: sarama.IncrementalAlterConfigsOperationSet, Value: &value}
			changes := map[string]sarama.IncrementalAlterConfigsEntry{"retention.ms": change}
			return nil, s.admin.IncrementalAlterConfig(sarama.TopicResource, s.topic, changes, false)
		})
		steps.Step("reassign", func() (any, error) {
			first := []int32{brokers[0]}
			if err := s.admin.AlterPartitionReassignments(s.topic, [][]int32{first, first, first}); err != nil {
				return nil, err
			}
			return s.admin.ListPartitionReassignments(s.topic, []int32{0, 1, 2})
		})
	}
	steps.Step("create partitions", func() (any, error) { return nil, s.admin.CreatePartitions(s.topic, 4, nil, false) })
	steps.Step("log dirs", func() (any, error) {
		found, err := s.admin.DescribeLogDirs(brokers)
		return len(found), err
	})
}

// groupSteps asks about the group that has read the topic, and ends it.
func (s *surface) groupSteps() {
	group := s.topic + "-group"
	steps.Step("list groups", func() (any, error) {
		found, err := s.admin.ListConsumerGroups()
		return nil, errors.Join(err, steps.Equal(found[group], "consumer"))
	})
	steps.Step("describe group", func() (any, error) {
		found, err := s.admin.DescribeConsumerGroups([]string{group})
		if err != nil {
			return nil, err
		}
		return nil, steps.Equal(found[0].State, "Empty")
	})
	steps.Step("list offsets of the group", func() (any, error) {
		found, err := s.admin.ListConsumerGroupOffsets(group, map[string][]int32{s.topic: {0, 1, 2}})
		if err != nil {
			return nil, err
		}
		for _, block := range found.Blocks[s.topic] {
			if block.Err != sarama.ErrNoError || block.Offset < 1 {
				return nil, fmt.Errorf("%+v", block)
			}
		}
		return nil, nil
	})
	if s.config.Version.IsAtLeast(sarama.V2_4_0_0) {
		steps.Step("delete an offset", func() (any, error) { return nil, s.admin.DeleteConsumerGroupOffset(group, s.topic, 0) })
	}
	steps.Step("delete group", func() (any, error) { return nil, s.admin.DeleteConsumerGroup(group) })
}

// refusedSteps are mistakes; each must be told as what it is.
func (s *surface) refusedSteps() {
	refused := func(name string, wanted error, run func() error) {
		steps.Step(name, func() (any, error) {
			if err := run(); !errors.Is(err, wanted) {
				return nil, fmt.Errorf("%v, and not %v", err, wanted)
			}
			return wanted, nil
		})
	}
	refused("topic that exists", sarama.ErrTopicAlreadyExists, func() error {
		return s.admin.CreateTopic(s.topic, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false)
	})
	refused("record that is too large", sarama.ErrMessageSizeTooLarge, func() error {
		config := s.with(func(config *sarama.Config) { config.Producer.MaxMessageBytes = 10 << 20 })
		producer, err := sarama.NewSyncProducer(s.servers, config)
		if err != nil {
			return err
		}
		defer producer.Close()
		_, _, err = producer.SendMessage(&sarama.ProducerMessage{Topic: s.topic, Value: sarama.ByteEncoder(make([]byte, 3<<20))})
		return err
	})
	refused("offset out of range", sarama.ErrOffsetOutOfRange, func() error {
		consumer, err := sarama.NewConsumer(s.servers, s.config)
		if err != nil {
			return err
		}
		defer consumer.Close()
		_, err = consumer.ConsumePartition(s.topic, 0, 1_000_000)
		return err
	})
	refused("topic that does not exist", sarama.ErrUnknownTopicOrPartition, func() error {
		return s.admin.DeleteTopic(s.topic + "-nowhere")
	})
}

func (s *surface) offsetsByTime() (any, error) {
	client, err := sarama.NewClient(s.servers, s.config)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	found := []int64{}
	for _, when := range []int64{sarama.OffsetOldest, sarama.OffsetNewest, 0, time.Now().Add(time.Hour).UnixMilli()} {
		offset, err := client.GetOffset(s.topic, 0, when)
		if err != nil {
			return found, err
		}
		found = append(found, offset)
	}
	if found[0] != 0 || found[1] < 1 || found[2] != 0 || found[3] != -1 {
		return found, errors.New("other offsets than expected")
	}
	return found, nil
}

func walk(servers []string, topic string, more ...string) {
	version, err := sarama.ParseKafkaVersion(more[0])
	steps.Must(err)
	s := &surface{servers: servers, topic: topic, config: configured(version)}
	admin, err := sarama.NewClusterAdmin(servers, s.config)
	steps.Must(err)
	defer admin.Close()
	s.admin = admin
	steps.Step("create topic", func() (any, error) {
		return nil, admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 3, ReplicationFactor: 1}, false)
	})
	for codec := sarama.CompressionNone; codec <= sarama.CompressionZSTD; codec++ {
		for _, acks := range []sarama.RequiredAcks{sarama.WaitForAll, sarama.WaitForLocal, sarama.NoResponse} {
			name := fmt.Sprint("send ", codec, " with acks ", acks)
			steps.Step(name, func() (any, error) {
				return s.send(s.with(func(config *sarama.Config) {
					config.Producer.Compression, config.Producer.RequiredAcks = codec, acks
				}), name, atATime)
			})
		}
	}
	steps.Step("send idempotently", func() (any, error) { return s.send(s.with(idempotent), "idempotent", atATime) })
	steps.Step("transactions", s.transactions)
	steps.Step("read as a group", func() (any, error) { return s.read(s.config, topic+"-group", s.written) })
	for _, strategy := range []sarama.BalanceStrategy{sarama.NewBalanceStrategySticky(), sarama.NewBalanceStrategyRoundRobin()} {
		steps.Step("read uncommitted, "+strategy.Name(), func() (any, error) {
			return s.read(s.with(func(config *sarama.Config) {
				config.Consumer.IsolationLevel = sarama.ReadUncommitted
				config.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{strategy}
				if version.IsAtLeast(sarama.V2_3_0_0) {
					config.Consumer.Group.InstanceId = "static"
				}
			}), topic+strategy.Name(), s.written+s.aborted)
		})
	}
	steps.Step("offsets by time", s.offsetsByTime)
	steps.Step("members come and go", s.rebalance)
	s.groupSteps()
	s.refusedSteps()
	s.clusterSteps()
	steps.Step("delete records", func() (any, error) { return nil, admin.DeleteRecords(topic, map[int32]int64{0: 1}) })
	steps.Step("delete topic", func() (any, error) { return nil, admin.DeleteTopic(topic) })
}

func write(servers []string, topic string, partitions int, seconds time.Duration) {
	config := configured(sarama.V3_6_0_0)
	idempotent(config)
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.Retry.Max = 1000
	producer, err := sarama.NewAsyncProducer(servers, config)
	steps.Must(err)
	acked := make([][]int, partitions)
	var reports sync.WaitGroup
	reports.Add(2)
	go func() {
		defer reports.Done()
		for message := range producer.Successes() {
			acked[message.Partition] = append(acked[message.Partition], message.Metadata.(int))
		}
	}()
	go func() {
		defer reports.Done()
		for err := range producer.Errors() {
			fmt.Println("error", err)
		}
	}()
	end := time.Now().Add(seconds)
	for number := 0; time.Now().Before(end); number++ {
		for partition := range acked {
			producer.Input() <- &sarama.ProducerMessage{
				Topic: topic, Partition: int32(partition), Value: sarama.StringEncoder(fmt.Sprint(number)), Metadata: number,
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
	producer.AsyncClose()
	reports.Wait()
	steps.PrintAcked(acked)
}

func main() {
	steps.Main(walk, write)
}
