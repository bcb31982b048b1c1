// Quire over gRPC-Web, as a page calls it: through the HTTP port, with what browsers have. A page of another origin
// needs the gateway's flag --allowed-origins.
//
// usage: web_client HOST:PORT [KEY]
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { demonstrate } from "./scenario.js";

const [address, key] = process.argv.slice(2);
await demonstrate(createGrpcWebTransport({ baseUrl: `http://${address}` }), key);
