// The details of an error: what of the request is at fault, and when to come back.
import path from "node:path";
import { loadSync } from "@grpc/proto-loader";

const definition = loadSync(path.join(import.meta.dirname, "../google/rpc/error_details.proto"), {
  keepCase: true,
  longs: Number,
  defaults: true,
});

/** The details of a failed call by their short names: ErrorInfo, BadRequest, RetryInfo. Empty where there are none. */
export function detailsOf(error) {
  const [data] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (data === undefined) return {};
  const status = definition["google.rpc.Status"].deserialize(data);
  const details = {};
  for (const { type_url, value } of status.details) {
    const name = type_url.split("/").pop();
    // A server may send details of types that this client does not know.
    if (name in definition) details[name.split(".").pop()] = definition[name].deserialize(value);
  }
  return details;
}
