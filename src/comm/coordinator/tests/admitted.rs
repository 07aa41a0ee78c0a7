//! Admitted ranks that fail or become malicious.

use super::*;
use crate::error::CallId;

#[test]
fn a_frame_that_a_rank_did_not_send_ends_its_connection_and_is_named() {
    for (what, bytes) in [("another tag", vec![0; 64]), ("a length beyond bounds", vec![200; 64])] {
        let port = port();
        let host = thread::spawn(move || meet(&launch(0, 2, port), LONG));
        let (mut stream, mut keys, answer) = claim(port, Some(&secret()), &join(1, 2));
        assert_eq!(answer, Some(Answer::Admitted));
        let complete =
            frame::receive::<Answer>(&mut stream, &mut keys.from_coordinator, 1 << 20, &mut vec![]);
        assert_eq!(complete.unwrap(), Answer::Complete);
        let host = host.join().unwrap().unwrap();
        stream.write_all(&bytes).unwrap();
        let Some(FirstFault::Failed { rank, cause }) = host.wait_for_fault(LONG) else {
            panic!("{what}: no fault")
        };
        assert!(rank == 1 && cause.contains("another process may have written to it"), "{what}: {cause}");
    }
}

/// An admitted rank that violates the protocol is named, and rank 0 continues.
#[test]
fn an_admitted_rank_that_breaks_the_protocol_is_named() {
    let fills = |client: &Client| {
        (0..1 << 12).for_each(|i| client.put(format!("{i}"), vec![0; 4000]));
    };
    let opens = |ranks: Vec<usize>| {
        move |client: &Client| client.tell(Message::Open { name: "g".into(), ranks: ranks.clone() })
    };
    let late = |client: &Client| {
        let sequence = crate::comm::calls::Sequence::Collective;
        client.tell(Message::Late {
            group: 5,
            sequence,
            seq: 0,
            call: "x".into(),
            compared: true,
            waited: Duration::MAX,
        });
    };
    type Wrong<'a> = (&'a dyn Fn(&Client), &'a str);
    let wrong: [Wrong<'_>; 4] = [
        (&opens(vec![1, 999]), "group g{1, 999} names rank 999 in a world of 2"),
        (&opens(vec![0]), "it opens g{0}, which it is not in"),
        (&fills, "it leaves more than 8388608 bytes under keys"),
        (&late, "it reports a call on group 0x5, which it has not opened"),
    ];
    for (says, want) in wrong {
        let met = all_of(2);
        says(&met[1]);
        for client in &met {
            let fault = client.wait_for_fault(LONG).expect("the rank is named");
            let text = fault.at(CallId::new("barrier", 0, "world{0, 1}")).to_string();
            assert!(text.contains("because rank 1 failed: it broke the protocol between ranks: "), "{text}");
            assert!(text.contains(want), "{text}");
        }
    }
}

/// A fault that fills a whole frame reaches all ranks and names the right one.
#[test]
fn a_fault_that_fills_a_frame_names_the_rank_that_caused_it() {
    let port = port();
    let host = thread::spawn(move || meet(&launch(0, 3, port), LONG));
    let (mut wicked, mut keys, _) = claim(port, Some(&secret()), &join(1, 3));
    let reads = thread::spawn(move || meet(&launch(2, 3, port), LONG).unwrap());
    let (reads, host) = (reads.join().unwrap(), host.join().unwrap().unwrap());
    let limit = frame::message_limit(3);
    let mut frame = Vec::new();
    let fills = Message::Failed { cause: "x".repeat(limit - 4) };
    frame::seal(&fills, &mut keys.to_coordinator, limit, &mut frame).unwrap();
    wicked.write_all(&frame).unwrap();
    for client in [&host, &reads] {
        let Some(FirstFault::Failed { rank: 1, cause }) = client.wait_for_fault(LONG) else {
            panic!("no fault")
        };
        assert!(cause.ends_with("x ..."));
    }
}

/// The first fault reaches the ranks that read within the two seconds that they wait, even if another rank does not
/// read.
#[test]
fn a_deaf_rank_delays_no_fault() {
    let port = port();
    let host = thread::spawn(move || meet(&launch(0, 4, port), LONG));
    let mut deaf: Vec<_> = [1, 2].map(|rank| claim(port, Some(&secret()), &join(rank, 4))).into();
    let reads = thread::spawn(move || meet(&launch(3, 4, port), LONG).unwrap());
    let (reads, host) = (reads.join().unwrap(), host.join().unwrap().unwrap());
    host.put("k".into(), vec![0; 4000]);
    for (stream, keys, _) in &mut deaf {
        stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        for _ in 0..20_000 {
            let mut frame = Vec::new();
            let get = Message::Get { key: "k".into() };
            frame::seal(&get, &mut keys.to_coordinator, 1 << 20, &mut frame).unwrap();
            if stream.write_all(&frame).is_err() {
                break;
            }
        }
    }
    let began = Instant::now();
    reads.tell(Message::Failed { cause: "boom".into() });
    let fault = host.wait_for_fault(LONG).unwrap();
    assert_eq!(reads.wait_for_fault(LONG), Some(fault));
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

/// A rank may report its end twice; one that sends other messages afterwards is named.
#[test]
fn who_speaks_after_its_end_is_named() {
    let met = all_of(2);
    (0..3).for_each(|_| met[1].tell(Message::Ended));
    assert_eq!(met[0].wait_for_fault(Duration::from_millis(100)), None);
    met[1].put("k".into(), vec![]);
    met[1].tell(Message::Open { name: "g".into(), ranks: vec![1] });
    let Some(FirstFault::Failed { rank: 1, cause }) = met[0].wait_for_fault(LONG) else { panic!("no fault") };
    assert!(cause.contains("it sends messages after its end"), "{cause}");
}

#[test]
fn a_deadline_may_be_of_any_length() {
    let port = port();
    let host = thread::spawn(move || meet(&launch(0, 2, port), Duration::MAX).map(drop));
    meet(&launch(1, 2, port), Duration::MAX).unwrap();
    host.join().unwrap().unwrap();
}

/// Long texts are cut to the limit of messages.
#[test]
fn a_long_cause_reaches_everybody() {
    let met = all_of(3);
    met[2].tell(Message::Failed { cause: "ü".repeat(1 << 20) });
    for client in &met {
        let Some(FirstFault::Failed { rank: 2, cause }) = client.wait_for_fault(LONG) else {
            panic!("no fault")
        };
        assert!(cause.ends_with("ü ...") && cause.len() < 20_000);
    }
}
