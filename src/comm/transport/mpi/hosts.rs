//! The addresses of this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Returns this machine's addresses, except those that only itself can reach, each with the length of its network
/// prefix in bits.
pub(super) fn addresses() -> Vec<(IpAddr, u32)> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    let mut found = Vec::new();
    // SAFETY: the pointer is to a live variable; the list is walked while it is live, and freed once.
    unsafe {
        if libc::getifaddrs(&mut first) != 0 {
            return found;
        }
        let mut at = first;
        while let Some(entry) = at.as_ref() {
            at = entry.ifa_next;
            let up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
            let only_here = entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0;
            if up
                && !only_here
                && let Some(ip) = ip_of(entry.ifa_addr)
            {
                found.push((ip, ip_of(entry.ifa_netmask).map_or(0, leading_ones)));
            }
        }
        libc::freeifaddrs(first);
    }
    found
}

/// Returns the IP address of a socket address, if it has one that other machines can use: link-local ones are left
/// out.
///
/// # Safety
/// The pointer is null or points to a socket address that is as long as its family requires.
unsafe fn ip_of(at: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise, and each address is read as a value of its family.
    unsafe {
        match i32::from(at.as_ref()?.sa_family) {
            libc::AF_INET => {
                let bits = (*at.cast::<libc::sockaddr_in>()).sin_addr.s_addr;
                Some(Ipv4Addr::from(u32::from_be(bits)).into())
            }
            libc::AF_INET6 => {
                let ip = Ipv6Addr::from((*at.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr);
                (ip.segments()[0] & 0xffc0 != 0xfe80).then_some(ip.into())
            }
            _ => None,
        }
    }
}

fn leading_ones(mask: IpAddr) -> u32 {
    match mask {
        IpAddr::V4(mask) => u32::from(mask).leading_ones(),
        IpAddr::V6(mask) => u128::from(mask).leading_ones(),
    }
}

/// Returns true if the first `bits` bits of two addresses are equal, i.e. they are on one network.
pub(super) fn are_near(a: IpAddr, b: IpAddr, bits: u32) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u32::from(a) ^ u32::from(b)).leading_zeros() >= bits.min(32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (u128::from(a) ^ u128::from(b)).leading_zeros() >= bits.min(128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks() {
        let ip = |text: &str| text.parse().unwrap();
        assert!(are_near(ip("10.1.2.3"), ip("10.1.9.9"), 16));
        assert!(!are_near(ip("10.1.2.3"), ip("10.1.9.9"), 24));
        assert!(!are_near(ip("10.1.2.3"), ip("fd00::1"), 0));
        assert!(are_near(ip("fd00::1"), ip("fd00::2"), 64));
        assert_eq!((leading_ones(ip("255.255.240.0")), leading_ones(ip("ffff::"))), (20, 16));
        assert!(addresses().iter().all(|(ip, _)| !ip.is_loopback()));
    }
}
