// Quire over gRPC from Node.js.
//
// usage: client HOST:PORT [KEY]
import { createGrpcTransport } from "@connectrpc/connect-node";
import { demonstrate } from "./scenario.js";

const [address, key] = process.argv.slice(2);
await demonstrate(createGrpcTransport({ baseUrl: `http://${address}` }), key);
