// Package steps runs what a client is asked to do, one step after the other, and tells of each; and it prints what a
// producer got acknowledged.
package steps

import (
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
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

// End ends the program: with 1 if a step has failed.
func End() {
	if failed > 0 {
		os.Exit(1)
	}
}

// Must ends the program if there is an error.
func Must(err error) {
	if err != nil {
		log.Fatal(err)
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
