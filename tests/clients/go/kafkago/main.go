// segmentio/kafka-go, in the steps that tests/e2e/test_other_clients.py asks for:
//
//	surface BOOTSTRAP TOPIC                       everything it can do
//	write BOOTSTRAP TOPIC PARTITIONS SECONDS      numbers to each partition; the client knows no idempotent producer
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"
	"tidelog.test/clients/steps"
)

const (
	deadline = 30 * time.Second
	atATime  = 20
	linger   = 5 * time.Millisecond
)

type surface struct {
	servers []string
	topic   string
	client  *kafka.Client
	written int
}

func (s *surface) createByConnection() (any, error) {
	first, err := kafka.Dial("tcp", s.servers[0])
	if err != nil {
		return nil, err
	}
	defer first.Close()
	controller, err := first.Controller()
	if err != nil {
		return nil, err
	}
	connection, err := kafka.Dial("tcp", net.JoinHostPort(controller.Host, strconv.Itoa(controller.Port)))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	return nil, connection.CreateTopics(kafka.TopicConfig{Topic: s.topic, NumPartitions: 3, ReplicationFactor: 1})
}

func (s *surface) writeAndReadByConnection(ctx context.Context) (any, error) {
	connection, err := kafka.DialLeader(ctx, "tcp", s.servers[0], s.topic, 0)
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	if err := connection.SetDeadline(time.Now().Add(deadline)); err != nil {
		return nil, err
	}
	if _, err := connection.WriteMessages(kafka.Message{Value: []byte("one")}, kafka.Message{Value: []byte("two")}); err != nil {
		return nil, err
	}
	s.written += 2
	if _, err := connection.Seek(1, kafka.SeekAbsolute); err != nil {
		return nil, err
	}
	message, err := connection.ReadMessage(1 << 20)
	if err != nil {
		return nil, err
	}
	return nil, steps.Equal(string(message.Value), "two")
}

func (s *surface) send(ctx context.Context, codec kafka.Compression, acks kafka.RequiredAcks) (any, error) {
	writer := &kafka.Writer{
		Addr: kafka.TCP(s.servers...), Topic: s.topic, Compression: codec, RequiredAcks: acks, BatchTimeout: linger,
		Balancer: &kafka.Murmur2Balancer{},
	}
	var messages []kafka.Message
	for each := 0; each < atATime; each++ {
		messages = append(messages, kafka.Message{
			Key:     []byte(fmt.Sprint(each)),
			Value:   []byte(fmt.Sprint(codec, acks, each)),
			Headers: []kafka.Header{{Key: "h", Value: []byte("v")}},
		})
	}
	s.written += atATime
	return atATime, errors.Join(writer.WriteMessages(ctx, messages...), writer.Close())
}

func (s *surface) reading(more kafka.ReaderConfig) *kafka.Reader {
	more.Brokers, more.MinBytes, more.MaxBytes, more.MaxWait = s.servers, 1, 1<<20, 200*time.Millisecond
	more.StartOffset = kafka.FirstOffset
	return kafka.NewReader(more)
}

func (s *surface) readPartitions(ctx context.Context) (any, error) {
	count := 0
	for partition := 0; partition < 3; partition++ {
		reader := s.reading(kafka.ReaderConfig{Topic: s.topic, Partition: partition})
		lag, err := reader.ReadLag(ctx)
		if err != nil {
			return nil, err
		}
		for each := int64(0); each < lag; each++ {
			if _, err := reader.ReadMessage(ctx); err != nil {
				return count, err
			}
			count++
		}
		if err := reader.Close(); err != nil {
			return nil, err
		}
	}
	return count, steps.Equal(count, s.written)
}

// readAsGroup reads with two members, which watch the topic's partitions; each record must be read.
func (s *surface) readAsGroup(ctx context.Context) (any, error) {
	ctx, stop := context.WithTimeout(ctx, deadline)
	defer stop()
	var mutex sync.Mutex
	read := map[string]bool{}
	var members sync.WaitGroup
	failures := make(chan error, 2)
	for range 2 {
		members.Add(1)
		go func() {
			defer members.Done()
			reader := s.reading(kafka.ReaderConfig{
				GroupID: s.topic + "-group", Topic: s.topic, CommitInterval: 50 * time.Millisecond,
				WatchPartitionChanges: true, PartitionWatchInterval: 500 * time.Millisecond,
				GroupBalancers: []kafka.GroupBalancer{kafka.RoundRobinGroupBalancer{}},
			})
			for {
				message, err := reader.ReadMessage(ctx)
				if err != nil {
					failures <- reader.Close()
					return
				}
				mutex.Lock()
				read[fmt.Sprint(message.Partition, "@", message.Offset)] = true
				if len(read) == s.written {
					time.AfterFunc(time.Second, stop) // after the commits
				}
				mutex.Unlock()
			}
		}()
	}
	members.Wait()
	return len(read), errors.Join(<-failures, <-failures, steps.Equal(len(read), s.written))
}

func (s *surface) transaction(ctx context.Context) (any, error) {
	id, group := s.topic+"-transactions", s.topic+"-with-transactions"
	begun, err := s.client.InitProducerID(ctx, &kafka.InitProducerIDRequest{TransactionalID: id, TransactionTimeoutMs: 10_000})
	if err != nil || begun.Error != nil {
		return nil, errors.Join(err, begun.Error)
	}
	producer := begun.Producer
	added, err := s.client.AddPartitionsToTxn(ctx, &kafka.AddPartitionsToTxnRequest{
		TransactionalID: id, ProducerID: producer.ProducerID, ProducerEpoch: producer.ProducerEpoch,
		Topics: map[string][]kafka.AddPartitionToTxn{s.topic: {{Partition: 0}}},
	})
	if err != nil || added.Topics[s.topic][0].Error != nil {
		return added, errors.Join(err, errors.New("a partition was not added"))
	}
	offsets, err := s.client.AddOffsetsToTxn(ctx, &kafka.AddOffsetsToTxnRequest{
		TransactionalID: id, ProducerID: producer.ProducerID, ProducerEpoch: producer.ProducerEpoch, GroupID: group,
	})
	if err != nil || offsets.Error != nil {
		return nil, errors.Join(err, offsets.Error)
	}
	committed, err := s.client.TxnOffsetCommit(ctx, &kafka.TxnOffsetCommitRequest{
		TransactionalID: id, GroupID: group, ProducerID: producer.ProducerID, ProducerEpoch: producer.ProducerEpoch,
		GenerationID: -1, Topics: map[string][]kafka.TxnOffsetCommit{s.topic: {{Partition: 0, Offset: 2}}},
	})
	if err != nil || committed.Topics[s.topic][0].Error != nil {
		return committed, errors.Join(err, errors.New("an offset was not committed"))
	}
	ended, err := s.client.EndTxn(ctx, &kafka.EndTxnRequest{
		TransactionalID: id, ProducerID: producer.ProducerID, ProducerEpoch: producer.ProducerEpoch, Committed: true,
	})
	if err != nil || ended.Error != nil {
		return nil, errors.Join(err, ended.Error)
	}
	for { // its markers are written after the answer
		found, err := s.client.ConsumerOffsets(ctx, kafka.TopicAndGroup{Topic: s.topic, GroupId: group})
		if err != nil || found[0] == 2 {
			return found, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (s *surface) groupSteps(ctx context.Context) {
	group := s.topic + "-group"
	steps.Step("offsets of the group", func() (any, error) {
		found, err := s.client.ConsumerOffsets(ctx, kafka.TopicAndGroup{Topic: s.topic, GroupId: group})
		total := int64(0)
		for _, offset := range found {
			total += offset
		}
		return found, errors.Join(err, steps.Equal(total, int64(s.written)))
	})
	steps.Step("list groups", func() (any, error) {
		found, err := s.client.ListGroups(ctx, &kafka.ListGroupsRequest{})
		if err != nil {
			return nil, err
		}
		for _, each := range found.Groups {
			if each.GroupID == group {
				return len(found.Groups), found.Error
			}
		}
		return nil, errors.New("the group is not listed")
	})
	steps.Step("describe group", func() (any, error) {
		found, err := s.client.DescribeGroups(ctx, &kafka.DescribeGroupsRequest{GroupIDs: []string{group}})
		if err != nil {
			return nil, err
		}
		return nil, steps.Equal(found.Groups[0].GroupState, "Empty")
	})
	steps.Step("commit and delete an offset", func() (any, error) {
		commits := map[string][]kafka.OffsetCommit{s.topic: {{Partition: 0, Offset: 1}}}
		_, err := s.client.OffsetCommit(ctx, &kafka.OffsetCommitRequest{GroupID: group, GenerationID: -1, Topics: commits})
		if err != nil {
			return nil, err
		}
		deleted, err := s.client.OffsetDelete(ctx, &kafka.OffsetDeleteRequest{GroupID: group, Topics: map[string][]int{s.topic: {0}}})
		if err != nil {
			return nil, err
		}
		return nil, deleted.Error
	})
	steps.Step("delete group", func() (any, error) {
		found, err := s.client.DeleteGroups(ctx, &kafka.DeleteGroupsRequest{GroupIDs: []string{group}})
		if err != nil {
			return nil, err
		}
		return nil, found.Errors[group]
	})
}

func (s *surface) topicSteps(ctx context.Context) {
	steps.Step("list offsets", func() (any, error) {
		asked := []kafka.OffsetRequest{kafka.FirstOffsetOf(0), kafka.LastOffsetOf(0), kafka.TimeOffsetOf(1, time.Now().Add(-time.Hour))}
		found, err := s.client.ListOffsets(ctx, &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{s.topic: asked}})
		if err != nil {
			return nil, err
		}
		for _, each := range found.Topics[s.topic] {
			if each.Error != nil || (each.Partition == 0 && each.LastOffset < 2) {
				return nil, fmt.Errorf("%+v", each)
			}
		}
		return nil, nil
	})
	steps.Step("alter and describe configs", func() (any, error) {
		set := kafka.IncrementalAlterConfigsRequestConfig{
			Name: "retention.ms", Value: "6666666", ConfigOperation: kafka.ConfigOperationSet,
		}
		altered, err := s.client.IncrementalAlterConfigs(ctx, &kafka.IncrementalAlterConfigsRequest{
			Resources: []kafka.IncrementalAlterConfigsRequestResource{{
				ResourceType: kafka.ResourceTypeTopic, ResourceName: s.topic,
				Configs: []kafka.IncrementalAlterConfigsRequestConfig{set},
			}},
		})
		if err != nil || altered.Resources[0].Error != nil {
			return altered, errors.Join(err, errors.New("not altered"))
		}
		found, err := s.client.DescribeConfigs(ctx, &kafka.DescribeConfigsRequest{
			Resources: []kafka.DescribeConfigRequestResource{{
				ResourceType: kafka.ResourceTypeTopic, ResourceName: s.topic, ConfigNames: []string{"retention.ms"},
			}},
		})
		if err != nil {
			return nil, err
		}
		return nil, steps.Equal(found.Resources[0].ConfigEntries[0].ConfigValue, "6666666")
	})
	steps.Step("create partitions", func() (any, error) {
		more := []kafka.TopicPartitionsConfig{{Name: s.topic, Count: 4}}
		found, err := s.client.CreatePartitions(ctx, &kafka.CreatePartitionsRequest{Topics: more})
		if err != nil {
			return nil, err
		}
		return nil, found.Errors[s.topic]
	})
	steps.Step("reassign", func() (any, error) {
		metadata, err := s.client.Metadata(ctx, &kafka.MetadataRequest{Topics: []string{s.topic}})
		if err != nil {
			return nil, err
		}
		found, err := s.client.AlterPartitionReassignments(ctx, &kafka.AlterPartitionReassignmentsRequest{
			Topic: s.topic, Timeout: deadline,
			Assignments: []kafka.AlterPartitionReassignmentsRequestAssignment{{
				Topic: s.topic, PartitionID: 0, BrokerIDs: []int{metadata.Brokers[0].ID},
			}},
		})
		if err != nil {
			return nil, err
		}
		return nil, errors.Join(found.Error, found.PartitionResults[0].Error)
	})
	steps.Step("elect leaders", func() (any, error) {
		asked := &kafka.ElectLeadersRequest{Topic: s.topic, Partitions: []int{1}, Timeout: deadline}
		found, err := s.client.ElectLeaders(ctx, asked)
		if err != nil {
			return nil, err
		}
		if err := found.PartitionResults[0].Error; err != nil && !errors.Is(err, kafka.ElectionNotNeeded) {
			return nil, err
		}
		return nil, found.Error
	})
	steps.Step("topic that does not exist", func() (any, error) {
		writer := &kafka.Writer{Addr: kafka.TCP(s.servers...), Topic: s.topic + "-nowhere", BatchTimeout: linger}
		defer writer.Close()
		if err := writer.WriteMessages(ctx, kafka.Message{Value: []byte("x")}); !errors.Is(err, kafka.UnknownTopicOrPartition) {
			return nil, fmt.Errorf("%v", err)
		}
		return nil, nil
	})
	steps.Step("delete topic", func() (any, error) {
		found, err := s.client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{s.topic}})
		if err != nil {
			return nil, err
		}
		return nil, found.Errors[s.topic]
	})
}

func walk(servers []string, topic string, _ ...string) {
	ctx, stop := context.WithTimeout(context.Background(), 4*deadline)
	defer stop()
	s := &surface{servers: servers, topic: topic, client: &kafka.Client{Addr: kafka.TCP(servers...), Timeout: deadline}}
	steps.Step("create topic", s.createByConnection)
	steps.Step("write and read by a connection", func() (any, error) { return s.writeAndReadByConnection(ctx) })
	for _, codec := range []kafka.Compression{0, kafka.Gzip, kafka.Snappy, kafka.Lz4, kafka.Zstd} {
		for _, acks := range []kafka.RequiredAcks{kafka.RequireAll, kafka.RequireOne, kafka.RequireNone} {
			steps.Step(fmt.Sprint("send ", codec, " with acks ", acks), func() (any, error) { return s.send(ctx, codec, acks) })
		}
	}
	steps.Step("read partitions", func() (any, error) { return s.readPartitions(ctx) })
	steps.Step("read as a group", func() (any, error) { return s.readAsGroup(ctx) })
	s.groupSteps(ctx)
	steps.Step("transaction", func() (any, error) { return s.transaction(ctx) })
	s.topicSteps(ctx)
}

func write(servers []string, topic string, partitions int, seconds time.Duration) {
	acked := make([][]int, partitions)
	end := time.Now().Add(seconds)
	var writers sync.WaitGroup
	for partition := range acked {
		writers.Add(1)
		go func() {
			defer writers.Done()
			writer := &kafka.Writer{
				Addr: kafka.TCP(servers...), Topic: topic, RequiredAcks: kafka.RequireAll, BatchTimeout: linger, MaxAttempts: 1000,
				Balancer: kafka.BalancerFunc(func(kafka.Message, ...int) int { return partition }),
			}
			defer writer.Close()
			for number := 0; time.Now().Before(end); number++ {
				if err := writer.WriteMessages(context.Background(), kafka.Message{Value: []byte(fmt.Sprint(number))}); err != nil {
					fmt.Println("error", err)
					continue
				}
				acked[partition] = append(acked[partition], number)
			}
		}()
	}
	writers.Wait()
	steps.PrintAcked(acked)
}

func main() {
	steps.Main(walk, write)
}
