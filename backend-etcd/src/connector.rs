//! An etcd cluster by configuration.

use std::sync::Arc;

use lockcore::{
    backend::{Call, Error, ErrorKind, LockBackend, Result, async_trait},
    config::{BackendConfig, Connector},
};

use crate::{EtcdBackend, EtcdConfig, Renewal};

/// Takes `etcd://[user:password@]host[:port][,host[:port]]...`, and `etcds://` for TLS; the port is 2379 where none is said.
///
/// Options, as in [`EtcdConfig`]: `connect-timeout` and `keep-alive` (durations), `renewal` (`keep-alive` or `swap`), and for
/// `etcds` `ca-file`, `cert-file`, `key-file` and `server-name`.
///
/// # Example
/// ```
/// use lockcore::{StoreUrl, config::{BackendConfig, Registry}};
/// use lockcore_etcd::Etcd;
///
/// let registry = Registry::new().with(Etcd);
/// let config = BackendConfig::new(StoreUrl::parse("etcd://etcd-a,etcd-b:2380?connect-timeout=1s")?);
/// registry.check(&config)?;
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Etcd;

#[async_trait]
impl Connector for Etcd {
    fn schemes(&self) -> &'static [&'static str] {
        &["etcd", "etcds"]
    }

    fn check(&self, config: &BackendConfig) -> Result<()> {
        read(config).map(drop)
    }

    async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        Ok(Arc::new(EtcdBackend::lazy(read(config)?)?))
    }

    async fn sweep(&self, config: &BackendConfig, call: &Call) -> Result<u64> {
        let backend = EtcdBackend::lazy(read(config)?)?;
        let swept = backend.sweep(call).await;
        backend.close().await;
        swept
    }
}

fn read(config: &BackendConfig) -> Result<EtcdConfig> {
    let url = &config.url;
    if !matches!(url.path(), "" | "/") {
        return Err(Error::new(
            ErrorKind::Misconfigured,
            "the address of an etcd cluster has hosts and no path; deployments are kept apart by namespace",
        ));
    }
    let scheme = if url.scheme() == "etcds" { "https" } else { "http" };
    let endpoints = url.hosts().map(|(host, port)| {
        let port = port.unwrap_or(2379);
        if host.contains(':') {
            format!("{scheme}://[{host}]:{port}")
        } else {
            format!("{scheme}://{host}:{port}")
        }
    });
    let endpoints: Vec<String> = endpoints.collect();
    let credentials = config.credentials()?;
    let mut options = config.options()?;
    let (connect_timeout, keep_alive) =
        (options.duration("connect-timeout")?, options.duration("keep-alive")?);
    let renewal = match options.text("renewal")?.as_deref() {
        None => Renewal::default(),
        Some("keep-alive") => Renewal::KeepAlive,
        Some("swap") => Renewal::Swap,
        Some(other) => {
            return Err(Error::new(
                ErrorKind::Misconfigured,
                format!("renewal is keep-alive or swap, not {other:?}"),
            ));
        }
    };
    let (ca_file, server_name) = (options.text("ca-file")?, options.text("server-name")?);
    let (cert_file, key_file) = (options.text("cert-file")?, options.text("key-file")?);
    options.finish()?;
    let read = EtcdConfig::new(endpoints).with(|c| {
        c.user = credentials.user().map(str::to_owned);
        c.password = credentials.expose_password().map(str::to_owned);
        c.connect_timeout = connect_timeout.unwrap_or(c.connect_timeout);
        c.keep_alive = keep_alive.unwrap_or(c.keep_alive);
        c.renewal = renewal;
        c.tls.ca_file = ca_file.map(Into::into);
        c.tls.cert_file = cert_file.map(Into::into);
        c.tls.key_file = key_file.map(Into::into);
        c.tls.server_name = server_name;
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
        let url = StoreUrl::parse("etcd://locks:s3cret@a,[::1]:99?keep-alive=3s&renewal=swap").unwrap();
        let read = read(&BackendConfig::new(url)).unwrap();
        assert_eq!(read.endpoints, ["http://a:2379", "http://[::1]:99"]);
        assert_eq!((read.user.as_deref(), read.password.as_deref()), (Some("locks"), Some("s3cret")));
        assert_eq!((read.keep_alive, read.renewal), (Duration::from_secs(3), Renewal::Swap));
    }

    #[cfg(feature = "tls")]
    #[test]
    fn an_address_with_tls_names_its_files() {
        let url =
            StoreUrl::parse("etcds://a,b:99?ca-file=/ca.pem&cert-file=/c.pem&key-file=/k.pem&server-name=n");
        let read = read(&BackendConfig::new(url.unwrap())).unwrap();
        assert_eq!(read.endpoints, ["https://a:2379", "https://b:99"]);
        assert_eq!(read.tls.ca_file.as_deref(), Some("/ca.pem".as_ref()));
        assert_eq!(read.tls.key_file.as_deref(), Some("/k.pem".as_ref()));
        assert_eq!(read.tls.server_name.as_deref(), Some("n"));
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let registry = Registry::new().with(Etcd);
        for (url, says) in [
            ("etcd://a/locks", "no path"),
            ("etcd://a?keepalive=1s", "keepalive"),
            ("etcd://a?keep-alive=0s", "keep_alive"),
            ("etcd://a?renewal=never", "keep-alive or swap"),
            ("etcd://a?ca-file=/ca.pem", "https://"),
        ] {
            let refused = match StoreUrl::parse(url) {
                Ok(url) => registry.check(&BackendConfig::new(url)).unwrap_err(),
                Err(error) => error,
            };
            assert!(refused.to_string().contains(says), "{url}: {refused}");
        }
    }
}
