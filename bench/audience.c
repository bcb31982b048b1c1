// A client of many streams, for measuring servers: over HTTP/1.1 with server-sent events, or over gRPC.
//
// Arguments: `http` or `grpc`, a port of 127.0.0.1, the number of streams, a file with the request (an HTTP request, or
// a gRPC message), and a file with the clock's texts, one a line, each of WIDTH bytes. Each token that the server sends
// is one of these texts: it says when its step ended, in ticks of TICK_MS of the monotonic clock. So this program knows
// the age of each token. For each line on its standard input it writes one line with what came since the line before:
// seconds, messages, tokens, its own seconds of processor time, and the ages of tokens in milliseconds (p50, p99, max).
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { WIDTH = 4, TICK_MS = 5, MAX_TICKS = 512, READ = 1 << 18, KEPT = 1 << 12, CODES = 1 << 20 };

typedef struct {  // What came of one stream and is not a whole message yet.
    int length;
    uint8_t kept[KEPT];
} Stream;

static int num_ticks, is_grpc;
static int16_t *tick_of;  // By the hash of a text, -1 if it is none of the clock's.
static Stream *streams;
static int num_streams;
static long messages, tokens, ages[MAX_TICKS];

static void fail(const char *what) {
    fprintf(stderr, "audience: %s (%s)\n", what, errno ? strerror(errno) : "protocol");
    exit(1);
}

static int code(const uint8_t *text) {
    uint32_t word;
    memcpy(&word, text, WIDTH);
    return (word * 2654435761u) >> 12;
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static char *contents(const char *path, long *length) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    *length = ftell(file);
    rewind(file);
    char *text = calloc(*length + 1, 1);
    if (fread(text, 1, *length, file) != (size_t)*length) fail(path);
    fclose(file);
    return text;
}

static void read_clock(const char *path) {
    long length;
    uint8_t *text = (uint8_t *)contents(path, &length);
    tick_of = malloc(CODES * sizeof *tick_of);
    memset(tick_of, 0xff, CODES * sizeof *tick_of);
    for (; (num_ticks + 1) * (WIDTH + 1) <= length && num_ticks < MAX_TICKS; num_ticks++) {
        int at = code(text + num_ticks * (WIDTH + 1));
        if (tick_of[at] >= 0) fail("two texts of the clock have one hash");
        tick_of[at] = num_ticks;
    }
}

// The text of one message: tokens of one or more steps.
static void take_text(const uint8_t *text, int length, int64_t now_tick) {
    if (!length) return;
    if (length % WIDTH) fail("a text is no whole number of tokens");
    messages++;
    for (int at = 0; at < length; at += WIDTH) {
        int tick = tick_of[code(text + at)];
        if (tick < 0) fail("a text is none of the clock's");
        tokens++;
        ages[((now_tick - tick) % num_ticks + num_ticks) % num_ticks]++;
    }
}

// An event, without its end: data: {..."content":"..."...}. Others have no text.
static void take_event(const uint8_t *event, int length, int64_t now_tick) {
    static const char name[] = "\"content\":\"";
    const uint8_t *found = memmem(event, length, name, sizeof name - 1);
    if (memmem(event, length, "\"error\"", 7)) fail("an event is an error");
    if (!found) return;
    found += sizeof name - 1;
    const uint8_t *end = memchr(found, '"', event + length - found);
    if (!end) fail("a content does not end");
    take_text(found, end - found, now_tick);
}

static uint64_t varint(const uint8_t **at) {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return value;
    }
}

// Calls `take` with each field of a message that has bytes and this number.
static void fields(const uint8_t *at, int length, unsigned number, int64_t now_tick,
                   void (*take)(const uint8_t *, int, int64_t)) {
    for (const uint8_t *end = at + length; at < end;) {
        uint64_t key = varint(&at);
        switch (key & 7) {
            case 0: varint(&at); break;
            case 1: at += 8; break;
            case 2: {
                uint64_t size = varint(&at);
                if (key >> 3 == number) take(at, size, now_tick);
                at += size;
                break;
            }
            case 5: at += 4; break;
            default: fail("an unknown kind of field");
        }
    }
}

static void take_chunk(const uint8_t *chunk, int length, int64_t now_tick) {
    fields(chunk, length, 4, now_tick, take_text);  // TokenChunk.text
}

// Takes the whole messages of a stream from its bytes; returns the number of bytes that they took.
static int take_messages(const uint8_t *bytes, int length, int64_t now_tick) {
    int taken = 0;
    if (is_grpc) {
        while (length - taken >= 5) {
            const uint8_t *at = bytes + taken;
            int size = at[1] << 24 | at[2] << 16 | at[3] << 8 | at[4];
            if (length - taken < 5 + size) break;
            fields(at + 5, size, 1, now_tick, take_chunk);  // GenerateStreamResponse.chunk
            taken += 5 + size;
        }
        return taken;
    }
    const uint8_t *end;
    while ((end = memmem(bytes + taken, length - taken, "\n\n", 2))) {
        take_event(bytes + taken, end - bytes - taken, now_tick);
        taken = end + 2 - bytes;
    }
    return taken;
}

static void take_bytes(Stream *stream, const uint8_t *bytes, int length, int64_t now_tick) {
    int taken = 0;
    if (stream->length) {
        // Completes the message that began before.
        int more = length < KEPT - stream->length ? length : KEPT - stream->length;
        memcpy(stream->kept + stream->length, bytes, more);
        int whole = take_messages(stream->kept, stream->length + more, now_tick);
        if (!whole) {
            if (more < length) fail("a message is too long");
            stream->length += more;
            return;
        }
        taken = whole - stream->length;
        stream->length = 0;
        if (taken < 0) fail("a message ended before its last bytes");
    }
    taken += take_messages(bytes + taken, length - taken, now_tick);
    if ((stream->length = length - taken) > KEPT) fail("a message is too long");
    memcpy(stream->kept, bytes + taken, stream->length);
}

static void put(int socket, const void *bytes, long length) {
    for (const char *at = bytes; length;) {
        ssize_t sent = send(socket, at, length, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) fail("send");
        if (sent > 0) at += sent, length -= sent;
    }
}

static int connected(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int one = 1, connection = socket(AF_INET, SOCK_STREAM, 0);
    if (connection < 0 || connect(connection, (void *)&address, sizeof address)) fail("connect");
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(connection, F_SETFL, O_NONBLOCK);
    return connection;
}

// HTTP/2, as far as a client of one server needs it: headers are not read, and windows are never full.

enum { DATA, HEADERS, RST_STREAM = 3, SETTINGS, PING = 6, GOAWAY, WINDOW_UPDATE };

static void frame(int connection, int type, int flags, uint32_t stream, const void *bytes, int length) {
    uint8_t head[9] = {length >> 16, length >> 8, length, type, flags, stream >> 24, stream >> 16, stream >> 8, stream};
    put(connection, head, sizeof head);
    put(connection, bytes, length);
}

static int literal(uint8_t *at, const char *text) {
    int length = strlen(text);
    *at = length;
    memcpy(at + 1, text, length);
    return length + 1;
}

static void open_grpc(int connection, const char *request, int length) {
    static const uint8_t windows[] = {0, 4, 0x7f, 0xff, 0xff, 0xff}, more[] = {0x7f, 0xff, 0, 0};
    put(connection, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
    frame(connection, SETTINGS, 0, 0, windows, sizeof windows);
    frame(connection, WINDOW_UPDATE, 0, 0, more, sizeof more);
    uint8_t head[256], *at = head, *body = malloc(length + 5);
    *at++ = 0x83, *at++ = 0x86;  // :method POST, :scheme http
    *at++ = 4, at += literal(at, "/quire.gateway.v1.GenerationService/GenerateStream");
    *at++ = 1, at += literal(at, "127.0.0.1");
    *at++ = 15, *at++ = 16, at += literal(at, "application/grpc");
    *at++ = 0, at += literal(at, "te"), at += literal(at, "trailers");
    body[0] = 0, body[1] = length >> 24, body[2] = length >> 16, body[3] = length >> 8, body[4] = length;
    memcpy(body + 5, request, length);
    for (int stream = 0; stream < num_streams; stream++) {
        frame(connection, HEADERS, 4, 2 * stream + 1, head, at - head);
        frame(connection, DATA, 1, 2 * stream + 1, body, length + 5);
    }
    free(body);
}

// Handles whole frames; returns the number of bytes that they took.
static int take_frames(int connection, const uint8_t *bytes, int length, int64_t now_tick) {
    int taken = 0;
    while (length - taken >= 9) {
        const uint8_t *at = bytes + taken;
        int size = at[0] << 16 | at[1] << 8 | at[2], type = at[3], flags = at[4];
        uint32_t stream = (at[5] & 127) << 24 | at[6] << 16 | at[7] << 8 | at[8];
        if (length - taken < 9 + size) break;
        at += 9;
        if (type == DATA && !(flags & 8)) {
            take_bytes(&streams[stream / 2], at, size, now_tick);
        } else if (type == SETTINGS && !(flags & 1)) {
            frame(connection, SETTINGS, 1, 0, at, 0);
        } else if (type == PING && !(flags & 1)) {
            frame(connection, PING, 1, 0, at, size);
        } else if (type == GOAWAY || type == RST_STREAM || (type <= HEADERS && flags & 1)) {
            fail("a stream ended");
        }
        taken += 9 + size;
    }
    return taken;
}

// HTTP/1.1: the lengths of chunks and the header stay among the bytes, as lines that no event is made of.
static int without_chunks(uint8_t *bytes, int length) {
    int kept = 0;
    for (int at = 0; at < length; at++)
        if (bytes[at] != '\r') bytes[kept++] = bytes[at];
    return kept;
}

static void report(double *since, double *used) {
    double now = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    long counted = 0, p50 = -1, p99 = -1, last = 0;
    for (int tick = 0; tick < num_ticks; tick++) {
        counted += ages[tick];
        if (p50 < 0 && counted * 2 >= tokens) p50 = tick;
        if (p99 < 0 && counted * 100 >= tokens * 99) p99 = tick;
        if (ages[tick]) last = tick;
    }
    printf("{\"seconds\": %.6f, \"messages\": %ld, \"tokens\": %ld, \"cpu_s\": %.6f, \"ages_ms\": [%ld, %ld, %ld]}\n",
           now - *since, messages, tokens, cpu - *used, p50 * TICK_MS, p99 * TICK_MS, last * TICK_MS);
    fflush(stdout);
    *since = now, *used = cpu, messages = tokens = 0;
    memset(ages, 0, sizeof ages);
}

int main(int argc, char **argv) {
    if (argc != 6) fail("expected: http|grpc PORT STREAMS REQUEST CLOCK");
    static uint8_t bytes[READ + 65536];
    long length;
    int held = 0, poll = epoll_create1(0), port = atoi(argv[2]), grpc_connection = -1;
    is_grpc = !strcmp(argv[1], "grpc");
    num_streams = atoi(argv[3]);
    char *request = contents(argv[4], &length), line[256];
    read_clock(argv[5]);
    streams = calloc(num_streams, sizeof *streams);
    int *sockets = calloc(num_streams, sizeof *sockets);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = num_streams}, events[64];
    epoll_ctl(poll, EPOLL_CTL_ADD, 0, &event);
    for (int each = 0; each < (is_grpc ? 1 : num_streams); each++) {
        event.data.u32 = each;
        sockets[each] = connected(port);
        if (is_grpc)
            open_grpc(grpc_connection = sockets[0], request, length);
        else
            put(sockets[each], request, length);
        epoll_ctl(poll, EPOLL_CTL_ADD, sockets[each], &event);
    }
    double since = seconds(CLOCK_MONOTONIC), used = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (;;) {
        int ready = epoll_wait(poll, events, 64, -1);
        int64_t now_tick = (int64_t)(seconds(CLOCK_MONOTONIC) * 1e3) / TICK_MS;
        for (int each = 0; each < ready; each++) {
            int index = events[each].data.u32;
            if (index == num_streams) {
                if (read(0, line, sizeof line) <= 0) return 0;
                report(&since, &used);
                continue;
            }
            ssize_t got = recv(sockets[index], bytes + held, READ, 0);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0) fail("a connection ended");
            if (is_grpc) {
                int taken = take_frames(grpc_connection, bytes, held + got, now_tick);
                memmove(bytes, bytes + taken, held += got - taken);
                if (held > 65536) fail("a frame is too long");
            } else {
                take_bytes(&streams[index], bytes, without_chunks(bytes, got), now_tick);
            }
        }
    }
}
