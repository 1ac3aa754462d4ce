// Node's own fetch, whole and streamed. Arguments: NAME URL KEY NAME URL KEY …, those of a rollout each.

const QUESTIONS = ["Who are you?", "What is 2 + 3?", "Say it again."];

async function ask(baseUrl, fields) {
  const response = await fetch(`${baseUrl}/chat/completions`, {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      Authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
    },
    body: JSON.stringify({ model: process.env.OPENAI_MODEL, ...fields }),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response.text();
}

async function whole(baseUrl, messages) {
  return JSON.parse(await ask(baseUrl, { messages })).choices[0].message.content;
}

async function streamed(baseUrl, messages) {
  const lines = (await ask(baseUrl, { messages, stream: true })).split("\n");
  const data = lines.filter((line) => line.startsWith("data: {")).map((line) => line.slice(6));
  const deltas = data.flatMap((text) => JSON.parse(text).choices.map((choice) => choice.delta));
  return deltas.map((delta) => delta.content ?? "").join("");
}

const ways = { whole, streamed };
const given = process.argv.slice(2);
for (let i = 0; i < given.length; i += 3) {
  const messages = [];
  process.env.OPENAI_API_KEY = given[i + 2];
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    const content = await ways[given[i]](given[i + 1], messages);
    messages.push({ role: "assistant", content: content.trim() });
  }
}
