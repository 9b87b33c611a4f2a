//! A ZooKeeper ensemble by configuration.

use std::sync::Arc;

use lockcore::{
    backend::{Call, LockBackend, Result, async_trait},
    config::{BackendConfig, Connector},
};

use crate::{ZkBackend, ZkConfig};

/// Takes `zk://[user:password@]host[:port][,host[:port]]...[/root]`, and `zks://` for TLS; the port is 2181
/// where none is said.
///
/// Options: `connect-timeout` and `idle-timeout` (durations), as in [`ZkConfig`]; with `zks` the files `ca-file`, `cert-file`
/// and `key-file`.
///
/// # Example
/// ```
/// use lockcore::{StoreUrl, config::{BackendConfig, Registry}};
/// use lockcore_zk::Zk;
///
/// let registry = Registry::new().with(Zk);
/// let config = BackendConfig::new(StoreUrl::parse("zk://zk-a,zk-b:2182/shop?connect-timeout=1s")?);
/// registry.check(&config)?;
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Zk;

#[async_trait]
impl Connector for Zk {
    fn schemes(&self) -> &'static [&'static str] {
        &["zk", "zks"]
    }

    fn check(&self, config: &BackendConfig) -> Result<()> {
        read(config).map(drop)
    }

    async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        Ok(Arc::new(ZkBackend::lazy(read(config)?)?))
    }

    async fn sweep(&self, config: &BackendConfig, call: &Call) -> Result<u64> {
        let backend = ZkBackend::lazy(read(config)?)?;
        let swept = backend.sweep(call).await;
        backend.close().await;
        swept
    }
}

fn read(config: &BackendConfig) -> Result<ZkConfig> {
    let url = &config.url;
    let credentials = config.credentials()?;
    let servers = url.hosts().map(|(host, port)| {
        let port = port.unwrap_or(2181);
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    });
    let servers: Vec<String> = servers.collect();
    let mut options = config.options()?;
    let (connect_timeout, idle_timeout) =
        (options.duration("connect-timeout")?, options.duration("idle-timeout")?);
    let [ca_file, cert_file, key_file] =
        [options.text("ca-file")?, options.text("cert-file")?, options.text("key-file")?];
    options.finish()?;
    let read = ZkConfig::new(servers).with(|c| {
        c.root = url.path().trim_end_matches('/').to_owned();
        c.secure = url.scheme() == "zks";
        c.tls.ca_file = ca_file.map(Into::into);
        c.tls.cert_file = cert_file.map(Into::into);
        c.tls.key_file = key_file.map(Into::into);
        c.user = credentials.user().map(str::to_owned);
        c.password = credentials.expose_password().map(str::to_owned);
        c.connect_timeout = connect_timeout.unwrap_or(c.connect_timeout);
        c.idle_timeout = idle_timeout.unwrap_or(c.idle_timeout);
    });
    read.check()?;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockcore::{StoreUrl, config::Registry};

    use super::*;

    #[test]
    fn addresses_become_configurations() {
        let url = StoreUrl::parse("zk://locks:s3cret@a,[::1]:99/shop/locks?idle-timeout=3s").unwrap();
        let read = read(&BackendConfig::new(url)).unwrap();
        assert_eq!(read.servers, ["a:2181", "[::1]:99"]);
        assert_eq!(read.root, "/shop/locks");
        assert_eq!((read.user.as_deref(), read.password.as_deref()), (Some("locks"), Some("s3cret")));
        assert_eq!(read.idle_timeout, Duration::from_secs(3));
    }

    #[cfg(feature = "tls")]
    #[test]
    fn an_address_with_tls_names_its_files() {
        let url = StoreUrl::parse("zks://a:2281?ca-file=/ca.pem&cert-file=/c.pem&key-file=/k.pem").unwrap();
        let read = read(&BackendConfig::new(url)).unwrap();
        assert!(read.secure);
        assert_eq!(read.tls.ca_file.as_deref(), Some("/ca.pem".as_ref()));
        assert_eq!(read.tls.key_file.as_deref(), Some("/k.pem".as_ref()));
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let registry = Registry::new().with(Zk);
        for (url, says) in [
            ("zk://a?idle=1s", "idle"),
            ("zk://a?idle-timeout=0s", "idle_timeout"),
            ("zk://a//b", "not a node"),
            ("zk://me@a", "go together"),
            ("zk://a?ca-file=/ca.pem", "TLS"),
            ("zks://a", "TLS"),
        ] {
            let refused = match StoreUrl::parse(url) {
                Ok(url) => registry.check(&BackendConfig::new(url)).unwrap_err(),
                Err(error) => error,
            };
            assert!(refused.to_string().contains(says), "{url}: {refused}");
        }
    }
}
