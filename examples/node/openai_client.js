// OpenAI's client against the HTTP port: a chat as it comes, and an error.
//
// usage: npm install && node openai_client.js [URL]
import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
// Any key will do where the server asks for none.
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const model = "quire-tiny";
const messages = [{ role: "user", content: "What is the capital of France?" }];

const chunks = await client.chat.completions.create({ model, messages, temperature: 0, stream: true });
for await (const chunk of chunks) process.stdout.write(chunk.choices[0].delta.content ?? "");
console.log();

try {
  await client.chat.completions.create({ model, messages, temperature: -1 });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  console.log(`refused: ${error.param}: ${error.error.message}`);
}
