// What the programs share: steps that are told of, one line each, and the numbers that were acknowledged.

let failed = 0

/** Run one step and print what it returns; after an error the program goes on. */
export async function step (name, run) {
  try {
    const found = await run()
    const text = found === undefined ? '' : JSON.stringify(found, (_, value) => typeof value === 'bigint' ? `${value}` : value)
    console.log(`ok ${name}: ${text}`)
  } catch (error) {
    failed++
    const causes = (error.errors ?? []).map(each => each.message)
    console.log(`failed ${name}: ${[error.message, ...causes].join('; ')}`)
  }
}

/** End the program: with 1 if a step has failed. */
export function end () {
  process.exit(failed ? 1 : 0)
}

export function equal (found, wanted) {
  if (found !== wanted) throw new Error(`${JSON.stringify(found)}, and not ${JSON.stringify(wanted)}`)
}

/** Check that it is refused, and that the message has this part. */
export async function refused (run, part) {
  try {
    await run()
  } catch (error) {
    const text = JSON.stringify([error.message, error.type, error.groups, ...(error.errors ?? []).map(each => each.message)])
    if (text.includes(part)) return part
    throw error
  }
  throw new Error('it was not refused')
}

export const count = (many, make) => Array.from({ length: many }, (_, each) => make(each))

/** Wait until the condition holds. */
export async function until (holds, milliseconds = 30_000) {
  const deadline = Date.now() + milliseconds
  while (!holds()) {
    if (Date.now() > deadline) throw new Error('the deadline has passed')
    await new Promise(resolve => setTimeout(resolve, 10))
  }
}

/** Write numbers to each partition, one after the other, by `send(partition, value)`, and print what was acknowledged. */
export async function write (partitions, seconds, send) {
  const end = Date.now() + seconds * 1000
  const acked = count(partitions, () => [])
  await Promise.all(acked.map(async (numbers, partition) => {
    for (let number = 0; Date.now() < end; number++) {
      try {
        await send(partition, `${number}`)
        numbers.push(number)
      } catch (error) {
        console.log(`error ${error.message}`)
      }
    }
  }))
  acked.forEach((numbers, partition) => console.log(`acked ${partition} ${numbers.join(' ')}`))
}
