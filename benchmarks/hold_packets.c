// What makes packets late where the kernel has no netem? A queue in user space that holds each packet for a while.
//
//     hold_packets QUEUE MICROSECONDS
//
// Packets that iptables sends to NFQUEUE number QUEUE are accepted MICROSECONDS after they came. Only their numbers
// come here, not their bytes, and one verdict accepts all that are due, so that the holding costs little.
// Build: gcc -O2 -o hold_packets hold_packets.c -lnetfilter_queue -lmnl

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <libmnl/libmnl.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <libnetfilter_queue/libnetfilter_queue.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

#define MAX_HELD (1u << 17) // a power of two: positions in the ring wrap
#define MAX_QUEUED 100000   // below MAX_HELD; what comes beyond it is dropped, as a full router does

static struct {
  uint32_t packet;
  uint64_t due_ns;
} held[MAX_HELD];
static uint32_t num_in, num_out;
static uint64_t delay_ns;
static uint16_t queue;
static struct mnl_socket *netlink;

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void send_message(struct nlmsghdr *message) {
  if (mnl_socket_sendto(netlink, message, message->nlmsg_len) < 0) {
    perror("hold_packets: netlink");
    exit(1);
  }
}

static int packet_came(const struct nlmsghdr *message, void *came_ns) {
  struct nlattr *attributes[NFQA_MAX + 1] = {0};
  if (nfq_nlmsg_parse(message, attributes) < 0 || !attributes[NFQA_PACKET_HDR]) return MNL_CB_OK;
  struct nfqnl_msg_packet_hdr *packet = mnl_attr_get_payload(attributes[NFQA_PACKET_HDR]);
  held[num_in % MAX_HELD].packet = ntohl(packet->packet_id);
  held[num_in % MAX_HELD].due_ns = *(uint64_t *)came_ns + delay_ns;
  num_in++;
  return MNL_CB_OK;
}

static void accept_what_is_due(void) {
  uint64_t now = now_ns();
  uint32_t before = num_out;
  while (num_out != num_in && held[num_out % MAX_HELD].due_ns <= now) num_out++;
  if (num_out == before) return;
  char buffer[256];
  struct nlmsghdr *message = nfq_nlmsg_put(buffer, NFQNL_MSG_VERDICT_BATCH, queue);
  struct nfqnl_msg_verdict_hdr verdict = {htonl(NF_ACCEPT), htonl(held[(num_out - 1) % MAX_HELD].packet)};
  mnl_attr_put(message, NFQA_VERDICT_HDR, sizeof verdict, &verdict);
  send_message(message);
}

static void bind_queue(void) {
  char buffer[4096];
  struct nlmsghdr *message = nfq_nlmsg_put(buffer, NFQNL_MSG_CONFIG, queue);
  nfq_nlmsg_cfg_put_cmd(message, AF_INET, NFQNL_CFG_CMD_BIND);
  send_message(message);
  message = nfq_nlmsg_put(buffer, NFQNL_MSG_CONFIG, queue);
  nfq_nlmsg_cfg_put_params(message, NFQNL_COPY_META, 0);
  nfq_nlmsg_cfg_put_qmaxlen(message, MAX_QUEUED);
  // Large segments come as one packet, not cut up first.
  mnl_attr_put_u32(message, NFQA_CFG_FLAGS, htonl(NFQA_CFG_F_GSO));
  mnl_attr_put_u32(message, NFQA_CFG_MASK, htonl(NFQA_CFG_F_GSO));
  send_message(message);
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: hold_packets QUEUE MICROSECONDS\n");
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL); // ends with whoever started it
  prctl(PR_SET_TIMERSLACK, 1);
  queue = atoi(argv[1]);
  delay_ns = strtoull(argv[2], NULL, 10) * 1000;
  netlink = mnl_socket_open(NETLINK_NETFILTER);
  if (!netlink || mnl_socket_bind(netlink, 0, MNL_SOCKET_AUTOPID) < 0) {
    perror("hold_packets: netlink");
    return 1;
  }
  int yes = 1, receive_bytes = 64 << 20;
  mnl_socket_setsockopt(netlink, NETLINK_NO_ENOBUFS, &yes, sizeof yes);
  setsockopt(mnl_socket_get_fd(netlink), SOL_SOCKET, SO_RCVBUFFORCE, &receive_bytes, sizeof receive_bytes);
  bind_queue();
  puts("ready");
  fflush(stdout);

  static char buffer[1 << 16];
  struct pollfd readable = {mnl_socket_get_fd(netlink), POLLIN, 0};
  for (;;) {
    accept_what_is_due();
    struct timespec wait = {3600, 0};
    if (num_out != num_in) {
      uint64_t now = now_ns(), due = held[num_out % MAX_HELD].due_ns;
      uint64_t left = due > now ? due - now : 0;
      wait.tv_sec = left / 1000000000, wait.tv_nsec = left % 1000000000;
    }
    if (ppoll(&readable, 1, &wait, NULL) <= 0) continue;
    // A few at a time, so that what is due does not wait for all that came.
    for (int reads = 0; reads < 64; reads++) {
      ssize_t size = recv(readable.fd, buffer, sizeof buffer, MSG_DONTWAIT);
      if (size <= 0) break;
      uint64_t came_ns = now_ns();
      mnl_cb_run(buffer, size, 0, mnl_socket_get_portid(netlink), packet_came, &came_ns);
    }
  }
}
