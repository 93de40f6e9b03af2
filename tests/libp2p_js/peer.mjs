// A js-libp2p peer that does what JSON lines on stdin say and answers on stdout: {"do": "ping", ...} -> {"ok": ...} or {"error": ...}.
// Values pass unchecked, as in an application that does not know our records: what is refused is refused by atoll.
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import { decode as multihash } from 'multiformats/hashes/digest'

Promise.withResolvers ??= function () { // Node 20 has none
  const parts = {}
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }))
  return parts
}

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    relay: circuitRelayServer(),
    dht: kadDHT({
      protocol: process.argv[2],
      clientMode: false,
      peerInfoMapper: passthroughMapper,
      allowQueryWithZeroPeers: true,
      validators: { atoll: async () => {} },
      selectors: { atoll: () => 0 }
    })
  }
})
const bytes = text => new Uint8Array(Buffer.from(text, 'base64'))
const text = data => Buffer.from(data).toString('base64')
const cid = key => CID.createV1(0x55, multihash(bytes(key)))
const signal = () => AbortSignal.timeout(20_000)

const actions = {
  keep: async ({ address }) => { // a place at a relay
    await node.components.transportManager.listen([multiaddr(`${address}/p2p-circuit`)])
    return node.getMultiaddrs().map(String).filter(own => own.includes('p2p-circuit'))
  },
  places: async () => node.services.relay.reservations.size,
  connect: async ({ address }) => (await node.dial(multiaddr(address), { signal: signal() })).remotePeer.toString(),
  ping: async ({ address }) => await node.services.ping.ping(multiaddr(address), { signal: signal() }),
  identify: async ({ address }) => {
    const said = await node.services.identify.identify(await node.dial(multiaddr(address)), { signal: signal() })
    return { protocols: said.protocols, agent: said.agentVersion, addresses: said.listenAddrs.map(String) }
  },
  table: async () => node.services.dht.routingTable.size,
  put: async ({ key, value }) => { await node.contentRouting.put(bytes(key), bytes(value), { signal: signal() }) },
  get: async ({ key }) => text(await node.contentRouting.get(bytes(key), { useCache: false, signal: signal() })),
  provide: async ({ key }) => { await node.contentRouting.provide(cid(key), { signal: signal() }) },
  find: async ({ key }) => {
    for await (const found of node.contentRouting.findProviders(cid(key), { useCache: false, signal: signal() })) {
      if (!found.id.equals(node.peerId)) return { peer: found.id.toString(), addresses: found.multiaddrs.map(String) }
    }
    return null
  }
}

console.log(JSON.stringify({ ok: { peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) } }))
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line)
  try {
    console.log(JSON.stringify({ ok: await actions[command.do](command) ?? null }))
  } catch (error) {
    console.log(JSON.stringify({ error: `${error.name}: ${error.message}` }))
  }
}
process.exit(0)
