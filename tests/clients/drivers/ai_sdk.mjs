// `ai` with `@ai-sdk/openai-compatible`: `generateText`, and every part of `streamText`.

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';

globalThis.AI_SDK_LOG_WARNINGS = false;

export async function run(job, said) {
  const leaving = new AbortController();
  const provider = createOpenAICompatible({
    name: 'gateway',
    baseURL: job.url + '/v1',
    apiKey: 'EMPTY',
    headers: job.headers,
    includeUsage: job.body.stream_options?.include_usage ?? false,
  });
  const question = {
    model: provider('m'),
    prompt: 'hi',
    abortSignal: leaving.signal,
    ...(job.retries === null ? {} : { maxRetries: job.retries }),
  };
  if (!job.stream) {
    const answer = await generateText(question);
    said.add(answer.text, answer.reasoningText);
    said.finish = answer.finishReason;
    return;
  }
  // Without `onError` the library prints errors, and goes on.
  const answer = streamText({ ...question, onError: () => {} });
  for await (const part of answer.fullStream) {
    if (part.type === 'text-delta') said.add(part.text);
    else if (part.type === 'reasoning-delta') said.add('', part.text);
    else if (part.type === 'finish') said.finish = part.finishReason;
    else if (part.type === 'error') said.fails(part.error);
    if (said.leaves(job)) {
      leaving.abort();
      return;
    }
  }
}
