// A text, a durable stream that survives its gateway, and errors with their details, over any transport of Connect.
import { type MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient, type CallOptions, type Client, type Transport } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { SamplingParametersSchema } from "./gen/quire/common/v1/common_pb.js";
import {
  GenerationService,
  type GenerateStreamResponse,
  type ResumeStreamResponse,
} from "./gen/quire/gateway/v1/generation_pb.js";

type Generation = Client<typeof GenerationService>;

const prompt = { case: "text", value: "Once upon a time" } as const;

function sampling(temperature: number): MessageInitShape<typeof SamplingParametersSchema> {
  // The text has characters of one to four bytes.
  return { temperature, constraint: { kind: { case: "regex", value: "(é [a-z]{2} 🦊 ){12}" } } };
}

async function generate(client: Generation, temperature: number, options: CallOptions): Promise<string> {
  const { sequences } = await client.generate({ prompt, sampling: sampling(temperature) }, options);
  return sequences[0]!.text;
}

/** What the client has of a stream's text. */
class Held {
  text = "";
  tokens = 0;

  async read(responses: AsyncIterable<GenerateStreamResponse | ResumeStreamResponse>): Promise<void> {
    for await (const { event } of responses) {
      if (event.case !== "chunk") continue;
      this.text += event.value.text;
      this.tokens += event.value.tokenIds.length;
      console.error(`tokens: ${this.tokens}`);
    }
  }

  /** Offsets count tokens, and Unicode code points: not UTF-16 units, which `text.length` counts. */
  get offset() {
    return { sequenceIndex: 0, offset: this.tokens, numCharacters: [...this.text].length };
  }
}

/** Whether the connection was lost, and not the call refused: such an error has no details of the server. */
function isLost(error: unknown): boolean {
  const { code, rawMessage } = ConnectError.from(error);
  console.error(`lost: ${Code[code]}: ${rawMessage}`);
  return ConnectError.from(error).findDetails(ErrorInfoSchema).length === 0;
}

/** A stream that continues through another gateway when its own is lost. */
async function stream(client: Generation, options: CallOptions): Promise<[string, number]> {
  const held = new Held();
  let requestId = "";
  const onHeader = (headers: Headers) => void (requestId = headers.get("quire-request-id") ?? "");
  let responses: AsyncIterable<GenerateStreamResponse | ResumeStreamResponse> = client.generateStream(
    { prompt, sampling: sampling(0), durable: true },
    { ...options, onHeader },
  );
  for (let resumed = 0; ; resumed++) {
    try {
      await held.read(responses);
      return [held.text, resumed];
    } catch (error) {
      if (!requestId || resumed > 50 || !isLost(error)) throw error;
      await new Promise((resolve) => setTimeout(resolve, 100));
      responses = client.resumeStream({ requestId, offsets: [held.offset] }, options);
    }
  }
}

/** The error of a call that fails. */
async function failure(call: Promise<unknown>): Promise<ConnectError> {
  try {
    await call;
  } catch (error) {
    return ConnectError.from(error);
  }
  throw new Error("the call was answered");
}

/** The reason in the details of an error, and the fields at fault. */
function describe(error: ConnectError): string {
  const reasons = error.findDetails(ErrorInfoSchema).map(({ reason }) => reason);
  const fields = error.findDetails(BadRequestSchema).flatMap((each) => each.fieldViolations.map(({ field }) => field));
  return [...reasons, ...fields].join(" ");
}

export async function demonstrate(transport: Transport, key?: string): Promise<void> {
  const client = createClient(GenerationService, transport);
  const options: CallOptions = { headers: key ? { authorization: `Bearer ${key}` } : {}, timeoutMs: 60_000 };

  console.log(`text: ${await generate(client, 0, options)}`);
  const [text, resumed] = await stream(client, options);
  console.log(`stream: ${text}`);
  console.log(`resumed: ${resumed > 0}`);
  console.log(`refused: ${describe(await failure(generate(client, -1, options)))}`);
  const wrong = { headers: { authorization: "Bearer wrong" } };
  console.log(`wrong key: ${describe(await failure(generate(client, 0, wrong)))}`);
  const late = await failure(generate(client, 0, { ...options, timeoutMs: 50 }));
  console.log(`deadline: ${late.code === Code.DeadlineExceeded}`);
  const leaving = new AbortController();
  setTimeout(() => leaving.abort(), 50);
  const left = await failure(generate(client, 0, { ...options, signal: leaving.signal }));
  console.log(`cancelled: ${left.code === Code.Canceled}`);
}
