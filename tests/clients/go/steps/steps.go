// Package steps runs what a client is asked to do, one step after the other, and tells of each; and it prints what a
// producer got acknowledged.
package steps

import (
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"time"
)

var failed int

// Step runs one step. What it returns, and an error, are printed; the program goes on.
func Step(name string, run func() (any, error)) {
	found, err := run()
	if err != nil {
		failed++
		fmt.Println("failed", name+":", err)
		return
	}
	fmt.Println("ok", name+":", found)
}

// Must ends the program if there is an error.
func Must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Main does what the program's arguments say: the walk over what a client can do, which may take one more argument, or
// the writing of numbers to the partitions of a topic for a time.
func Main(surface func(servers []string, topic string, more ...string), write func(servers []string, topic string, partitions int, lasts time.Duration)) {
	servers, topic, more := strings.Split(os.Args[2], ","), os.Args[3], os.Args[4:]
	switch os.Args[1] {
	case "surface":
		surface(servers, topic, more...)
	case "write":
		write(servers, topic, Number(more[0]), time.Duration(Number(more[1]))*time.Second)
	default:
		log.Fatal("usage: see the head of the program")
	}
	if failed > 0 {
		os.Exit(1)
	}
}

// Number is an argument as a number.
func Number(text string) int {
	found, err := strconv.Atoi(text)
	Must(err)
	return found
}

// Equal is an error unless both are the same.
func Equal[T comparable](found, wanted T) error {
	if found != wanted {
		return fmt.Errorf("%v, and not %v", found, wanted)
	}
	return nil
}

// PrintAcked prints a line for each partition: the numbers that were acknowledged, in this order.
func PrintAcked(acked [][]int) {
	for partition, numbers := range acked {
		texts := make([]string, len(numbers))
		for at, number := range numbers {
			texts[at] = strconv.Itoa(number)
		}
		fmt.Println("acked", partition, strings.Join(texts, " "))
	}
}
