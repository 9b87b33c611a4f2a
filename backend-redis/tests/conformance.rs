//! A Redis server of the test's own under the suite: one server a run, a namespace of its own for each case.

use std::{
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use lockcore::{
    LockName,
    backend::{LockBackend, Owner, async_trait},
};
use lockcore_conformance::{Service, Suite};
use lockcore_redis::{RedisBackend, RedisConfig};

#[path = "../src/tests/server.rs"]
#[allow(dead_code, unreachable_pub)]
mod server;

struct RedisServer {
    port: u16,
    namespace: OnceLock<String>,
}

impl RedisServer {
    fn on(port: u16) -> Self {
        Self { port, namespace: OnceLock::new() }
    }

    /// The second road: the key itself, by the shape that the crate's README gives.
    fn key(&self, name: &LockName) -> String {
        let name = name.as_str().replace('{', "%7B").replace('}', "%7D");
        format!("lockcore:{}:{{{name}}}:lock", self.namespace.get().map_or("", String::as_str))
    }

    fn raw<T: redis::FromRedisValue>(&self, command: &str, key: &str) -> T {
        let client =
            redis::Client::open(format!("redis://127.0.0.1:{}/", self.port)).expect("a plain address");
        let mut connection = client.get_connection().expect("the server answers");
        redis::cmd(command).arg(key).query(&mut connection).expect("the server answers")
    }
}

#[async_trait]
impl Service for RedisServer {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        connect(self.port.to_string()).await
    }

    async fn holder(&self, name: &LockName) -> Option<Owner> {
        let value: Option<String> = self.raw("GET", &self.key(name));
        let hex = value?.split('|').next()?.to_owned();
        let mut bytes = [0; 16];
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * n..2 * n + 2)?, 16).ok()?;
        }
        Some(Owner::from_bytes(bytes))
    }

    async fn steal(&self, name: &LockName) {
        let _: i64 = self.raw("DEL", &self.key(name));
    }

    fn namespace(&self, seed: u64) -> String {
        self.namespace.get_or_init(|| format!("c{seed:x}")).clone()
    }

    async fn version(&self) -> Option<String> {
        let told: String = self.raw("INFO", "server");
        let field = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        // Valkey goes on saying 7.2 where programs look for the Redis that it came from.
        let valkey = field("valkey_version:").map(|version| format!("Valkey {version}"));
        valkey.or_else(|| Some(format!("Redis {}", field("redis_version:")?)))
    }

    fn address(&self) -> Option<String> {
        Some(self.port.to_string())
    }
}

async fn connect(port: String) -> Arc<dyn LockBackend> {
    let port = port.parse().expect("a port");
    Arc::new(RedisBackend::connect(RedisConfig::new("127.0.0.1", port)).await.expect("the server answers"))
}

fn main() -> ExitCode {
    // A client process of a case needs no server of its own.
    if let Some(code) = lockcore_conformance::child_main(connect) {
        return code;
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime can be made");
    let Some(server) = runtime.block_on(server::Server::start()) else {
        return ExitCode::SUCCESS;
    };
    let port = server.port;
    Suite::new("redis-single", async move || RedisServer::on(port)).main()
}
