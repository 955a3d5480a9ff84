-- Return what identifies a caller to the guard: all of the credentials, or the certificate; for a caller without any,
-- whom the guard admits if no keys are required, the connection.
local function caller(handle)
  local headers = handle:headers()
  local bearer, key = headers:get("authorization"), headers:get("x-api-key")
  if bearer or key then
    return (bearer or "") .. "\n" .. (key or "")
  end
  local tls = handle:streamInfo():downstreamSslConnection()
  if tls and tls:peerCertificatePresented() then
    return tls:sha256PeerCertificateDigest()
  end
  return handle:streamInfo():downstreamDirectRemoteAddress()
end

