// An HTTP filter of Envoy that sends small gRPC messages to the native server (proxy-wasm ABI 0.2.1).
//
// grpcio's guard checks a caller before any of the message is read. The native server reads the message first, so it
// gets only messages that are complete, small and not compressed. This filter holds a call until its message is
// complete or too large, and then marks the call for its route. It never admits anybody: both servers check each call.
// `scripts/wasm` compiles this file.

#define EXPORT(name) __attribute__((export_name(name)))
#define IMPORT(name) __attribute__((import_module("env"), import_name(name)))

typedef unsigned char u8;
typedef unsigned int u32;

enum { OK = 0, NOT_FOUND = 1 };                       // results
enum { CONTINUE = 0, STOP = 1 };                      // actions; STOP lets Envoy keep what has arrived
enum { REQUEST_HEADERS = 0, REQUEST_BODY = 0, CONFIGURATION = 7 };
enum { CALLS = 1 << 16 };
enum { PREFIX_BYTES = 5 }; // of a message: whether it is compressed, and its size

IMPORT("proxy_get_buffer_bytes") u32 get_buffer(u32, u32, u32, u8 **, u32 *);
IMPORT("proxy_get_header_map_value") u32 get_header(u32, const char *, u32, u8 **, u32 *);
IMPORT("proxy_replace_header_map_value") u32 set_header(u32, const char *, u32, const char *, u32);
IMPORT("proxy_call_foreign_function") u32 call(const char *, u32, const void *, u32, u8 **, u32 *);

static u8 arrived[256]; // the last value that Envoy gave to this module
static u32 most_bytes;
static u32 held[CALLS]; // held calls, each at its number modulo CALLS; a call whose place is taken is not held

EXPORT("proxy_abi_version_0_2_1") void abi_version(void) {}
EXPORT("proxy_on_memory_allocate") void *allocate(u32 size) { return size <= sizeof arrived ? arrived : 0; }

EXPORT("proxy_on_configure") u32 configure(u32 context, u32 size) {
  u8 *found;
  most_bytes = 0;
  if (size > sizeof arrived || get_buffer(CONFIGURATION, 0, size, &found, &size) != OK)
    return 0;
  for (u32 at = 0; at < size; at++)
    most_bytes = most_bytes * 10 + found[at] - '0';
  return 1;
}

static int is_compressed(void) {
  static const char plain[] = "identity";
  u8 *found;
  u32 size = 0, at = 0;
  u32 result = get_header(REQUEST_HEADERS, "grpc-encoding", 13, &found, &size);
  if (result == NOT_FOUND || (result == OK && !size))
    return 0;
  while (result == OK && at < size && found[at] == plain[at])
    at++;
  return at != sizeof plain - 1 || at != size;
}

// Choose the call's server, and let it go on.
static u32 release(u32 call_id, const char *server, u32 size) {
  u8 *found;
  u32 found_size;
  held[call_id % CALLS] = 0;
  set_header(REQUEST_HEADERS, "x-penstock-server", 17, server, size);
  call("clear_route_cache", 17, 0, 0, &found, &found_size);
  return CONTINUE;
}

// Tell the gateway the size of a large message, which is in its prefix, so that the gateway reads it when there is room.
static void set_size(void) {
  u8 *found;
  u32 size = 0, number;
  char text[10];
  if (get_buffer(REQUEST_BODY, 0, PREFIX_BYTES, &found, &size) != OK || size < PREFIX_BYTES)
    return;
  number = (u32)found[1] << 24 | (u32)found[2] << 16 | (u32)found[3] << 8 | found[4];
  u32 at = sizeof text;
  do {
    text[--at] = '0' + number % 10;
    number /= 10;
  } while (number);
  set_header(REQUEST_HEADERS, "x-penstock-message-bytes", 24, text + at, sizeof text - at);
}

EXPORT("proxy_on_request_headers") u32 request_headers(u32 call_id, u32 count, u32 is_end) {
  if (is_end || held[call_id % CALLS] || is_compressed())
    return CONTINUE;
  held[call_id % CALLS] = call_id;
  return STOP;
}

EXPORT("proxy_on_request_body") u32 request_body(u32 call_id, u32 size, u32 is_end) {
  if (held[call_id % CALLS] != call_id)
    return CONTINUE;
  if (size > most_bytes) {
    set_size();
    return release(call_id, "large", 5);
  }
  return is_end ? release(call_id, "native", 6) : STOP;
}

EXPORT("proxy_on_request_trailers") u32 request_trailers(u32 call_id, u32 count) {
  return held[call_id % CALLS] == call_id ? release(call_id, "large", 5) : CONTINUE;
}

EXPORT("proxy_on_delete") void delete(u32 context) {
  if (held[context % CALLS] == context)
    held[context % CALLS] = 0;
}

EXPORT("proxy_on_context_create") void create(u32 context, u32 parent) {}
EXPORT("proxy_on_vm_start") u32 start(u32 root, u32 size) { return 1; }
EXPORT("proxy_on_done") u32 done(u32 context) { return 1; }
