// A network filter of Envoy that bounds the connections of each client address (proxy-wasm ABI 0.2.1).
//
// Envoy bounds the connections of a port and of a process, but not those of an address. The counts are in Envoy's
// shared data, because each worker thread of Envoy has an instance of this module. An address hashes to one of 65,536
// counts, so the memory is bounded; a random seed keeps strangers from finding addresses that share somebody's count.
// The addresses of an IPv6 network of 64 bits count as one, because one client can have all of them.
// `scripts/wasm` compiles this file.

#define EXPORT(name) __attribute__((export_name(name)))
#define IMPORT(name) __attribute__((import_module("env"), import_name(name)))

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { OK = 0 };                                        // results
enum { CONTINUE = 0, STOP = 1 };                        // actions
enum { DOWNSTREAM = 2, CONFIGURATION = 7, COUNTER = 0 }; // streams, buffers, metrics
enum { COUNTS = 1 << 16, SEED = COUNTS, TRIES = 1000 };

IMPORT("proxy_get_property") u32 get_property(const char *, u32, u8 **, u32 *);
IMPORT("proxy_get_buffer_bytes") u32 get_buffer(u32, u32, u32, u8 **, u32 *);
IMPORT("proxy_get_shared_data") u32 get_shared(const void *, u32, u8 **, u32 *, u32 *);
IMPORT("proxy_set_shared_data") u32 set_shared(const void *, u32, const void *, u32, u32);
IMPORT("proxy_get_current_time_nanoseconds") u32 now_ns(u64 *);
IMPORT("proxy_close_stream") u32 close_stream(u32);
IMPORT("proxy_define_metric") u32 define_metric(u32, const char *, u32, u32 *);
IMPORT("proxy_increment_metric") u32 increment_metric(u32, long long);

static u8 arrived[256]; // the last value that Envoy gave to this module
static u32 most, refused;
static u64 seed;

EXPORT("proxy_abi_version_0_2_1") void abi_version(void) {}
EXPORT("proxy_on_memory_allocate") void *allocate(u32 size) { return size <= sizeof arrived ? arrived : 0; }

static u64 mixed(u64 hash, u32 value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
  return hash ^ hash >> 29;
}

static u32 digit(u8 character) { return character <= '9' ? character - '0' : (character | 32) - 'a' + 10; }

// Return the count to which an address belongs: `1.2.3.4:5`, or `[2001:db8::7]:5`.
static u32 count_of(const u8 *text, u32 size) {
  u64 hash = seed;
  u32 number = 0, groups = 0;
  if (!size || text[0] != '[') {
    for (u32 at = 0; at < size && text[at] != ':'; at++)
      hash = mixed(hash, text[at]);
    return mixed(hash, 4) >> 48;
  }
  for (u32 at = 1; at < size && groups < 4 && text[at] != ']'; at++) {
    if (text[at] != ':') {
      number = number << 4 | digit(text[at]);
      continue;
    }
    if (text[at - 1] == ':') // the rest of the four groups is zero, or belongs to the client
      break;
    hash = mixed(hash, number);
    number = 0;
    groups++;
  }
  for (; groups < 4; groups++)
    hash = mixed(hash, 0);
  return mixed(hash, 6) >> 48;
}

// Change the count of this connection's address by one, and return the new count.
static u32 change(int by) {
  u8 *found;
  u32 size = 0;
  if (get_property("source\0address", 14, &found, &size) != OK)
    return 0;
  u32 key = count_of(found, size);
  for (u32 tries = 0; tries < TRIES; tries++) {
    u32 version = 0, count = 0;
    if (get_shared(&key, sizeof key, &found, &size, &version) == OK && size == sizeof count)
      __builtin_memcpy(&count, found, sizeof count);
    count = by < 0 && !count ? 0 : count + by;
    if (set_shared(&key, sizeof key, &count, sizeof count, version) == OK)
      return count;
  }
  return 0;
}

EXPORT("proxy_on_configure") u32 configure(u32 context, u32 size) {
  static const u32 key = SEED;
  u8 *found;
  u32 version;
  most = 0;
  if (size > sizeof arrived || get_buffer(CONFIGURATION, 0, size, &found, &size) != OK)
    return 0;
  for (u32 at = 0; at < size; at++)
    most = most * 10 + found[at] - '0';
  now_ns(&seed);
  seed = mixed(mixed(seed, (u32)(seed >> 32)), (u32)seed);
  if (get_shared(&key, sizeof key, &found, &size, &version) == OK && size == sizeof seed)
    __builtin_memcpy(&seed, found, sizeof seed);
  else
    set_shared(&key, sizeof key, &seed, sizeof seed, 0);
  define_metric(COUNTER, "connections_of_address_refused", 30, &refused);
  return 1;
}

EXPORT("proxy_on_new_connection") u32 new_connection(u32 context) {
  if (change(1) <= most)
    return CONTINUE;
  increment_metric(refused, 1);
  close_stream(DOWNSTREAM);
  return STOP;
}

EXPORT("proxy_on_downstream_connection_close") void closed(u32 context, u32 by) { change(-1); }

EXPORT("proxy_on_context_create") void create(u32 context, u32 parent) {}
EXPORT("proxy_on_vm_start") u32 start(u32 root, u32 size) { return 1; }
EXPORT("proxy_on_done") u32 done(u32 context) { return 1; }
EXPORT("proxy_on_delete") void delete(u32 context) {}
