// Runs one real client: the same jobs and outcomes as serve.py.
//
//     node serve.mjs openai_js

import process from 'node:process';
import readline from 'node:readline';

class Said {
  text = '';
  reasoning = '';
  finish = null;
  pieces = 0;
  error = null;
  has_left = false;
  ended_ns = 0;

  add(text, reasoning) {
    if (text) {
      this.text += text;
      this.pieces += 1;
    }
    if (reasoning) this.reasoning += reasoning;
  }

  leaves(job) {
    this.has_left = job.leave_after != null && this.pieces >= job.leave_after;
    return this.has_left;
  }

  fails(error) {
    this.error = { class: error?.name ?? error?.constructor?.name ?? typeof error, message: String(error?.message ?? error) };
    if (error?.constructor?.name && this.error.class === 'Error') this.error.class = error.constructor.name;
  }
}

const client = await import(`./${process.argv[2]}.mjs`);
process.stdout.write('ready\n');
for await (const line of readline.createInterface({ input: process.stdin })) {
  const said = new Said();
  try {
    await client.run(JSON.parse(line), said);
  } catch (error) {
    said.fails(error);
  }
  said.ended_ns = Number(process.hrtime.bigint());
  process.stdout.write(JSON.stringify(said) + '\n');
}
process.exit(0);
