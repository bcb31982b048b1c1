// Quire over gRPC, from the proto files alone: a text as it comes, an error with its details, a deadline.
//
// usage: npm install && node grpc_client.js [HOST:PORT]
import path from "node:path";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { detailsOf } from "./error_details.js";

const definition = loadSync("quire/gateway/v1/generation.proto", {
  includeDirs: [path.join(import.meta.dirname, "../../protos")],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: false,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).quire.gateway.v1;

async function stream(client) {
  const request = {
    text: "Once upon a time",
    sampling: { temperature: 0 },
    stopping: { max_tokens: 40 },
  };
  // Each message is one of: a chunk of a sequence, a sequence's end, the end of all.
  for await (const { event, chunk, finished, completed } of client.GenerateStream(request)) {
    if (event === "chunk") process.stdout.write(chunk.text ?? "");
    if (event === "finished") console.log(`\n(${finished.num_tokens} tokens, ${finished.finish_reason})`);
    if (event === "completed") console.log(`(request ${completed.request_id})`);
  }
}

/** A unary call as a promise. */
function generate(client, request, options = {}) {
  return new Promise((resolve, reject) => {
    client.Generate(request, options, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

async function refused(client) {
  try {
    await generate(client, { text: "Once upon a time", sampling: { temperature: -1 } });
  } catch (error) {
    const { ErrorInfo, BadRequest } = detailsOf(error);
    console.log(`refused: ${grpc.status[error.code]}, ${ErrorInfo.reason}`);
    for (const { field, description } of BadRequest.field_violations) console.log(`  ${field} ${description}`);
  }
}

async function late(client) {
  const request = { text: "Once upon a time", stopping: { max_tokens: 400, ignore_eos: true } };
  try {
    await generate(client, request, { deadline: Date.now() + 20 });
  } catch (error) {
    console.log(`too late: ${grpc.status[error.code]}`);
  }
}

const client = new GenerationService(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure());
try {
  await stream(client);
  await refused(client);
  await late(client);
} finally {
  client.close();
}
