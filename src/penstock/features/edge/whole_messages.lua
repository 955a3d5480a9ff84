-- Send messages that are complete and large to grpcio, which bounds the bytes of large messages.
local LARGE_BYTES = @large_bytes@

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get("x-penstock-server") then
    local size = tonumber(headers:get("content-length") or "0")
    if size > LARGE_BYTES then
      handle:streamInfo():dynamicMetadata():set("penstock", "large", caller(handle))
      headers:remove("x-penstock-server")
      handle:clearRouteCache()
    end
  end
end
