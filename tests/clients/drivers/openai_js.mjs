// `openai` from npm.

import OpenAI from 'openai';

export async function run(job, said) {
  const client = new OpenAI({
    baseURL: job.url + '/v1',
    apiKey: 'EMPTY',
    defaultHeaders: job.headers,
    timeout: job.timeout * 1000,
    ...(job.retries === null ? {} : { maxRetries: job.retries }),
  });
  const answer = await client.chat.completions.create({
    model: 'm',
    messages: [{ role: 'user', content: 'hi' }],
    stream: job.stream,
    ...job.body,
  });
  if (!job.stream) {
    const choice = answer.choices[0];
    said.add(choice.message.content, choice.message.reasoning_content);
    said.finish = choice.finish_reason;
    return;
  }
  for await (const chunk of answer) {
    for (const choice of chunk.choices) {
      said.add(choice.delta.content, choice.delta.reasoning_content);
      said.finish = choice.finish_reason ?? said.finish;
    }
    if (said.leaves(job)) {
      answer.controller.abort();
      return;
    }
  }
}
