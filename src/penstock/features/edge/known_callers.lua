-- Send ModelInfer of known callers to the native gRPC server, and all other gRPC calls to grpcio.
--
-- grpcio's guard checks a caller before any of the message is read. The native server reads the whole message first,
-- so it gets only callers whom the guard has admitted a moment ago, and only whole messages of a limited size. This
-- script learns callers from the gateway's answers; it never admits anybody: both servers check each call.
local INFER = "/inference.GRPCInferenceService/ModelInfer"
local SERVER, ADMITTED = "x-penstock-server", "x-penstock-admitted"
local KNOWN_S = @known_s@
local MOST_CALLERS = 10000

local known, count = {}, 0

local function now(handle)
  return tonumber(handle:timestampString()) / 1000000
end

local function learn(who, until_s)
  if count >= MOST_CALLERS then
    known, count = {}, 0
  end
  if not known[who] then
    count = count + 1
  end
  known[who] = until_s
end

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get(":path") ~= INFER then
    return
  end
  local encoding = headers:get("grpc-encoding")
  if encoding and encoding ~= "identity" then -- the native server unpacks without a limit
    return
  end
  local who = caller(handle)
  local until_s = known[who]
  if until_s and until_s > now(handle) then
    headers:replace(SERVER, "native")
    handle:clearRouteCache()
  else
    handle:streamInfo():dynamicMetadata():set("penstock", "caller", who)
  end
end

function envoy_on_response(handle)
  local found = handle:streamInfo():dynamicMetadata():get("penstock")
  if not found then
    return
  end
  local headers = handle:headers()
  if found["large"] then -- the next messages of this caller are not held here
    known[found["large"]] = nil
  end
  if headers:get(ADMITTED) then
    headers:remove(ADMITTED)
    if found["caller"] then
      learn(found["caller"], now(handle) + KNOWN_S)
    end
  end
end
