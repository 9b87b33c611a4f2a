//! Locks on ZooKeeper.
