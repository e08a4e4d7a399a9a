// Transactions with franz-go, in the steps that tests/e2e/test_franz_go.py asks for:
//
//	write BOOTSTRAP ID TOPIC PARTITIONS COUNT       COUNT transactions; each third one is aborted
//	fence BOOTSTRAP ID TOPIC                        a second producer of the same transactional id takes over
//	copy BOOTSTRAP ID SOURCE TARGET GROUP WANTED    consume, transform, produce; each third transaction is aborted
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"tidelog.test/clients/steps"
)

func options(bootstrap, id string) []kgo.Opt {
	return []kgo.Opt{
		kgo.SeedBrokers(strings.Split(bootstrap, ",")...),
		kgo.TransactionalID(id),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	}
}

func producer(bootstrap, id string) *kgo.Client {
	client, err := kgo.NewClient(options(bootstrap, id)...)
	steps.Must(err)
	return client
}

func tell(ctx context.Context, client *kgo.Client, when string) {
	id, epoch, err := client.ProducerID(ctx)
	steps.Must(err)
	fmt.Println(when, "epoch", epoch, "of", id)
}

func write(ctx context.Context, bootstrap, id, topic string, partitions, count int) {
	client := producer(bootstrap, id)
	defer client.Close()
	tell(ctx, client, "before")
	for each := 0; each < count; each++ {
		steps.Must(client.BeginTransaction())
		for partition := 0; partition < partitions; partition++ {
			record := &kgo.Record{Topic: topic, Partition: int32(partition), Value: []byte(strconv.Itoa(each))}
			steps.Must(client.ProduceSync(ctx, record).FirstErr())
		}
		steps.Must(client.EndTransaction(ctx, kgo.TransactionEndTry(each%3 != 2)))
	}
	tell(ctx, client, "after")
}

func fence(ctx context.Context, bootstrap, id, topic string) {
	first := producer(bootstrap, id)
	defer first.Close()
	steps.Must(first.BeginTransaction())
	steps.Must(first.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: []byte("first")}).FirstErr())
	second := producer(bootstrap, id)
	defer second.Close()
	steps.Must(second.BeginTransaction())
	steps.Must(second.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: []byte("second")}).FirstErr())
	var refused *kerr.Error
	if errors.As(first.EndTransaction(ctx, kgo.TryCommit), &refused) {
		fmt.Println("refused", refused.Message)
	}
	steps.Must(second.EndTransaction(ctx, kgo.TryCommit))
}

func copyRecords(ctx context.Context, bootstrap, id, source, target, group string, wanted int) {
	session, err := kgo.NewGroupTransactSession(append(
		options(bootstrap, id),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(source),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.SessionTimeout(6*time.Second),
		kgo.RequireStableFetchOffsets(),
	)...)
	steps.Must(err)
	defer session.Close()
	for round, copied := 1, 0; copied < wanted; round++ {
		fetches := session.PollRecords(ctx, 20)
		steps.Must(fetches.Err())
		steps.Must(session.Begin())
		count := 0
		fetches.EachRecord(func(record *kgo.Record) {
			made := &kgo.Record{Topic: target, Partition: record.Partition, Value: record.Value}
			session.Produce(ctx, made, func(_ *kgo.Record, err error) {
				if !errors.Is(err, kgo.ErrAborting) { // what an abort drops
					steps.Must(err)
				}
			})
			count++
		})
		committed, err := session.End(ctx, kgo.TransactionEndTry(round%3 != 0))
		steps.Must(err)
		if committed {
			copied += count
			fmt.Println("copied", copied)
		}
	}
}

func main() {
	ctx, args := context.Background(), os.Args[1:]
	switch args[0] {
	case "write":
		write(ctx, args[1], args[2], args[3], steps.Number(args[4]), steps.Number(args[5]))
	case "fence":
		fence(ctx, args[1], args[2], args[3])
	case "copy":
		copyRecords(ctx, args[1], args[2], args[3], args[4], args[5], steps.Number(args[6]))
	default:
		log.Fatal("no such step: ", args[0])
	}
}
